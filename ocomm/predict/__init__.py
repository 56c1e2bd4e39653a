"""What a training step will take, dense and with 1 bit, before anyone trains: ``python -m ocomm.predict``.

``model`` is the arithmetic, ``__main__`` the program. It advises; it never switches anything.
"""
