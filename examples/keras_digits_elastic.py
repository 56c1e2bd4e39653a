"""Horovod's elastic training for Keras, as people have it. One line is not Horovod's: the import.

    ocommrun -np 2 --min-np 2 python examples/keras_digits_elastic.py
    ocommrun -np 2 --min-np 2 python examples/keras_digits_elastic.py --die-at 30    # a rank is killed; fit goes on
    ocommrun -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python examples/keras_digits_elastic.py

The second ends with the parameters of the first, bit for bit. It reads scikit-learn's 8 x 8 digits.
"""

import argparse
import hashlib
import os
import signal

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
from sklearn.datasets import load_digits

import ocomm_tf.keras as hvd  # was: import horovod.keras as hvd

parser = argparse.ArgumentParser(description="Keras digits, elastic, Horovod's way")
parser.add_argument("--batch-size", type=int, default=32, help="per rank")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--dense", action="store_true", help="plain Adam; 1-bit Adam without")
parser.add_argument("--freeze-step", type=int, default=20, help="1-bit Adam: number of dense steps before compression")
parser.add_argument("--batches-per-commit", type=int, default=8)
parser.add_argument("--die-at", type=int, default=0, help="step in which the last rank is killed, once")
args = parser.parse_args()

hvd.init()
keras.utils.set_random_seed(42)
images, labels = load_digits(return_X_y=True)
images = images.reshape(-1, 8, 8, 1) / 16
train_images, train_labels = (part[:1408][hvd.rank() :: hvd.size()] for part in (images, labels))

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(args.lr)
if args.dense:
    optimizer = hvd.DistributedOptimizer(optimizer)
else:
    optimizer = hvd.DistributedOneBitAdam(optimizer, freeze_step=args.freeze_step)
model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])


def die(batch, logs):
    """Ends the last rank of the first generation."""
    step = int(optimizer.iterations.numpy())
    if step == args.die_at and hvd.rank() == hvd.size() - 1 and os.environ.get("OCOMM_ELASTIC_GENERATION", "1") == "1":
        os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    print(f"rank {hvd.rank()} of {hvd.size()} begins in epoch {state.epoch}, batch {state.batch}", flush=True)
    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        keras.callbacks.LambdaCallback(on_train_batch_end=die),
        hvd.elastic.CommitStateCallback(state, args.batches_per_commit),
    ]
    while state.epoch < args.epochs:
        rest = slice(state.batch * args.batch_size, None)  # of an epoch that has begun
        model.fit(
            train_images[rest],
            train_labels[rest],
            batch_size=args.batch_size,
            initial_epoch=state.epoch,
            epochs=state.epoch + 1,
            shuffle=False,
            callbacks=callbacks,
            verbose=2 if hvd.rank() == 0 else 0,
        )


train(hvd.elastic.KerasState(model, epoch=0, batch=0))

hvd.check_replicas(model.trainable_variables)
if hvd.rank() == 0:
    loss, accuracy = model.evaluate(images[1408:], labels[1408:], verbose=0)
    digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.trainable_variables)).hexdigest()
    print(f"test loss {loss:.4f}, accuracy {100 * accuracy:.2f} %, parameters sha256 {digest[:16]}")
hvd.shutdown()
