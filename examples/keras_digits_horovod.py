"""A Horovod training script for Keras, as people have them. One line is not Horovod's: the import.

    ocommrun -np 2 python examples/keras_digits_horovod.py              # dense Adam, as before
    ocommrun -np 2 python examples/keras_digits_horovod.py --one-bit    # 1-bit Adam: one more line, see below

It reads scikit-learn's 8 x 8 digits, which need no download.
"""

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from sklearn.datasets import load_digits

import ocomm_tf.keras as hvd  # was: import horovod.keras as hvd

parser = argparse.ArgumentParser(description="Keras digits, Horovod's way")
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--one-bit", action="store_true", help="1-bit Adam")
parser.add_argument("--freeze-step", type=int, default=40, help="1-bit Adam: number of dense steps before compression")
parser.add_argument("--output", help="where the first rank saves the model")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(42 + hvd.rank())

images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1) / 16
train = images[:1408][hvd.rank() :: hvd.size()], labels[:1408][hvd.rank() :: hvd.size()]
test = images[1408:], labels[1408:]

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)

optimizer = keras.optimizers.Adam(args.lr)
if args.one_bit:  # the line to change for 1-bit Adam
    optimizer = hvd.DistributedOneBitAdam(optimizer, freeze_step=args.freeze_step)
else:
    optimizer = hvd.DistributedOptimizer(optimizer)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
model.fit(
    *train,
    batch_size=args.batch_size,
    epochs=args.epochs,
    callbacks=callbacks,
    validation_data=test,
    verbose=2 if hvd.rank() == 0 else 0,
)

hvd.check_replicas(model.trainable_variables)
if hvd.rank() == 0:
    loss, accuracy = model.evaluate(*test, verbose=0)
    print(f"test loss {loss:.4f}, accuracy {100 * accuracy:.2f} %")
    if args.one_bit:
        print(f"{optimizer.compression_report()['ratio']:.1f} times fewer bytes than dense")
    if args.output:
        model.save(args.output)
hvd.shutdown()
