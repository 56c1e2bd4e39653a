"""Predicts the time of a training step, dense and with 1 bit, before anyone trains: ``python -m ocomm.predict``.

``model`` is the arithmetic, ``__main__`` the program. It only advises, and changes no setting.
"""
