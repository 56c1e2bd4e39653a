"""Faults in ocomm that ``make test`` must notice: each is put into a copy of the tree, where the tests that should fail
are run.

    python -m tests.mutations [--laws] [NUMBER ...]

For each it prints the first test that fails, "missed", or "missed, but for the long tier" where only ``make test-long``
fails. ``--laws``: of the faults in frontends and optimizers, those that random programs alone notice, and how many it
takes. A change of the code may make a fault impossible to insert: then its text here has to follow. The extension must
have been built; C is built anew for faults in ``native``, which takes a minute each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What stands for the files of tests that run on two real ranks.
MPI = "under mpirun"
#: The random programs of every kind.
PROGRAMS = "programs/test_programs.py"
#: By the folder of a fault: the kinds of programs that should notice it.
LAWS = {
    "ocomm/optim": ("torch_compressed", "torch_diloco", "keras_compressed"),
    "ocomm_torch": ("torch_compressed", "torch_dense", "torch_diloco", "torch_distributed", "collectives"),
    "ocomm_tf": ("keras_dense", "keras_compressed", "collectives"),
}
ON_TWO_RANKS = "contract/test_transport.py world/test_collectives.py world/test_runtime.py"
#: Seconds for the tests of one fault, one of which may hang.
LIMIT_S = 900.0


@dataclass(frozen=True)
class Mutation:
    """``old``, which the file has once, becomes ``new``; one of ``tests``, files below tests/, should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str


# fmt: off
MUTATIONS = [
    Mutation(
        "C: error feedback dropped",
        "native/kernels_body.h",
        "UNROLL for (int v = 0; v < VECTORS; v++) c[v] -= FN(toward)(c[v], scale);",
        "UNROLL for (int v = 0; v < VECTORS; v++) c[v] = (V){0} * scale;",
        "contract/test_kernels.py",
    ),
    Mutation(
        "C: |g| of Birder without abs",
        "native/quantize_body.h",
        "(V)((I)grad[v] & INT32_MAX);",
        "grad[v];",
        "contract/test_quantizer.py",
    ),
    Mutation(
        "C: Lion's zero up and down swapped",
        "native/quantize_body.h",
        "yes[v] = zero_up ? FN(at_least)(c, (V){0}) : FN(greater)(c, (V){0});",
        "yes[v] = zero_up ? FN(greater)(c, (V){0}) : FN(at_least)(c, (V){0});",
        "contract/test_quantizer.py",
    ),
    Mutation(
        "C: mean keeps no error where masked",
        "native/kernels_body.h",
        "if (content == MEAN) kept[v] = FN(select)(lanes, error[v], c[v]);",
        ";",
        "contract/test_kernels.py",
    ),
    Mutation(
        "C: all signs of a sketch are positive",
        "native/kernels_body.h",
        "FN(select)(FN(lanes_of)((uint32_t)(hash >> 32), v), -row[v], row[v])",
        "row[v]",
        "contract/test_kernels.py",
    ),
    Mutation(
        "C: a sum of floats leaves out what fills no row of lanes",
        "native/kernels_body.h",
        "for (int i = 0; j + i < piece->count; i++) lanes[i] += x[i];",
        ";",
        "contract/test_kernels.py",
    ),
    Mutation(
        "clipping: the hashes of a sketch are those of every step",
        "ocomm/training/driver.py",
        "self.core.sketch_seed = self.steps + 1",
        "self.core.sketch_seed = 1",
        "frontends/test_torch_clipping.py",
    ),
    Mutation(
        "clipping: a rank's own norm is that of the average",
        "ocomm/optim/sketch.py",
        "for message in messages:",
        "for message in messages[:1] * len(messages):",
        "frontends/test_torch_clipping.py",
    ),
    Mutation(
        "C engine: flags of others ignored",
        "native/engine.c",
        "*flags |= header.flags;",
        ";",
        "contract/test_engine.py frontends/test_torch_onebit.py",
    ),
    Mutation(
        "C engine: a header may blame a rank that is none",
        "native/engine.c",
        "culprit = (int)(other < (uint32_t)ranks ? other : mine->rank);",
        "culprit = (int)other;",
        "fuzz/test_native.py",
    ),
    Mutation(
        "a text that is cut off is a shorter text",
        "ocomm/negotiation/request.py",
        "if nbytes > left:",
        "if nbytes > left + 1:",
        "fuzz/test_messages.py",
    ),
    Mutation(
        "C engine: replicas not compared",
        "native/engine.c",
        "for (int field = 0; field < 7; field++)",
        "for (int field = 0; field < 6; field++)",
        "contract/test_engine.py frontends/test_torch_drift.py",
    ),
    Mutation(
        "C engine: abandoned channel counts as whole",
        "native/engine.c",
        "channel->failed || channel->abandoned ? -1",
        "channel->failed ? -1",
        "contract/test_engine.py world/test_limits.py",
    ),
    Mutation(
        "C: no zeros for a missing gradient",
        "native/reduce.c",
        "            memset(c->packed + run->position, 0, nbytes);",
        "            ;",
        "contract/test_engine.py frontends/test_torch_onebit.py",
    ),
    Mutation(
        "layout: owners by number of blocks",
        "ocomm/compression/layout.py",
        "heapq.heapreplace(loads, (load + length, owner))",
        "heapq.heapreplace(loads, (load + 1, owner))",
        "unit/test_layout.py",
    ),
    Mutation(
        "layout: digest without dtype",
        "ocomm/compression/layout.py",
        "(spec.name, [int(n) for n in spec.shape], spec.order, spec.dtype)",
        "(spec.name, [int(n) for n in spec.shape], spec.order)",
        "unit/test_layout.py frontends/test_torch_masters.py",
    ),
    Mutation(
        "layout: message padding of 4",
        "ocomm/compression/layout.py",
        "sizes = _padded(header + scale_nbytes + codes_nbytes, 8)",
        "sizes = _padded(header + scale_nbytes + codes_nbytes, 4)",
        "unit/test_layout.py",
    ),
    Mutation(
        "Lion: the momentum ignores a loss scale",
        "ocomm/optim/lion.py",
        "one_minus_beta2=(1.0 - self.betas[1]) * self.gradient_scale",
        "one_minus_beta2=(1.0 - self.betas[1])",
        "unit/test_lion.py frontends/test_torch_lion.py frontends/test_torch_clipping.py",
    ),
    Mutation(
        "1-bit Adam: decay not times lr",
        "ocomm/optim/onebit_adam.py",
        "rows[\"decay\"][index] = 1.0 - lr * group.decoupled_decay",
        "rows[\"decay\"][index] = 1.0 - group.decoupled_decay",
        "unit/test_onebit_adam.py frontends/test_torch_onebit.py",
    ),
    Mutation(
        "1-bit Adam: errors of absent tensors lost",
        "ocomm/optim/onebit_adam.py",
        "                self.errors.keep(tensor)\n",
        "",
        "unit/test_onebit_adam.py frontends/test_torch_onebit.py",
    ),
    Mutation(
        "Lion: a node has one vote",
        "ocomm/optim/lion.py",
        "np.array([len(node) for node in layout.nodes.members], np.float32)",
        "np.array([1 for node in layout.nodes.members], np.float32)",
        "unit/test_lion.py frontends/test_torch_hierarchical.py",
    ),
    Mutation(
        "Lion: zeros alternate by step only",
        "ocomm/optim/lion.py",
        "(self.committed + self._worker) % 2",
        "self.committed % 2",
        "unit/test_lion.py frontends/test_torch_lion.py",
    ),
    Mutation(
        "freeze: one step late",
        "ocomm/optim/freeze.py",
        "if step - first + 1 < warmup_steps:",
        "if step - first < warmup_steps:",
        "unit/test_freeze.py",
    ),
    Mutation(
        "0/1 Adam: intervals double one step early",
        "ocomm/optim/intervals.py",
        "(step - self.start) // self.doubling",
        "(step - self.start + 1) // self.doubling",
        "unit/test_intervals.py",
    ),
    Mutation(
        "replicas: the last window stops too early",
        "ocomm/optim/replicas.py",
        "high = total if number + 1 == self._count else high",
        "pass",
        "frontends/test_torch_drift.py frontends/test_torch_comparison.py",
    ),
    Mutation(
        "coordinator: every channel counts as empty",
        "ocomm/negotiation/coordinator.py",
        "is_empty = set(said.values()) == {segments} and segments >= 0",
        "is_empty = True",
        "unit/test_negotiation.py world/test_limits.py",
    ),
    Mutation(
        "fusion: threshold exclusive",
        "ocomm/negotiation/fusion.py",
        "nbytes + skipped + request.nbytes <= threshold_nbytes",
        "nbytes + skipped + request.nbytes < threshold_nbytes",
        "unit/test_fusion.py",
    ),
    Mutation(
        "cache: part of a group is answered",
        "ocomm/negotiation/cache.py",
        "            if members & mask != members:\n                mask &= ~members\n",
        "            pass\n",
        "unit/test_negotiation.py world/test_runtime.py frontends/test_torch_ops.py",
    ),
    Mutation(
        "coordinator: element order not compared",
        "ocomm/negotiation/coordinator.py",
        "    (\"element order\", lambda r: r.order, set(Kind)),\n",
        "",
        "unit/test_negotiation.py frontends/test_tf_mixed.py",
    ),
    Mutation(
        "nodes: an error is not passed on inside a node",
        "ocomm/collectives/phases.py",
        "gather[0].compute[:0] = [segment_header.check_and_pass_on(route.rows), *average(route.rows)]",
        "gather[0].compute[:0] = [segment_header.check(route.rows), *average(route.rows)]",
        "frontends/test_torch_hierarchical.py",
    ),
    Mutation(
        "dense: sums inside a node are not weighted",
        "ocomm/collectives/dense.py",
        "weight = self.context.nodes.weight if self.op == ReduceOp.AVERAGE else 1.0",
        "weight = 1.0",
        "world/test_hierarchical.py unit/test_dense_plans.py",
    ),
    Mutation(
        "dense: reducescatter forgets the factor",
        "ocomm/collectives/dense.py",
        "loop(Kernels.reduce, None, dtype, op, rows, prescale, factor, out)",
        "loop(Kernels.reduce, None, dtype, op, rows, prescale, 1.0, out)",
        "world/test_collectives.py unit/test_dense_plans.py frontends/test_torch_ops.py",
    ),
    Mutation(
        "deadlock: threads that could submit are ignored",
        "ocomm/runtime/deadlock.py",
        "return not could_submit and self._clock()",
        "return self._clock()",
        "world/test_stalls.py cluster/test_deadlock.py",
    ),
    Mutation(
        "deadlock: a call that a rank has begun does not count",
        "ocomm/ordered.py",
        "self._begun[self._watch.name] = number + 1",
        "pass",
        "world/test_stalls.py",
    ),
    Mutation(
        "authenticated socket: the length of a message is not authenticated",
        "ocomm/runtime/authenticated_socket.py",
        "self._check(header[_NUMBER.size :], _tag(key, b\"length\", number, length), \"length\")",
        "pass",
        "unit/test_authenticated_socket.py unit/test_server.py",
    ),
    Mutation(
        "authenticated socket: the server lets anybody in",
        "ocomm/runtime/authenticated_socket.py",
        "if not hmac.compare_digest(answer[_NONCE:], _tag(key, b\"client\", server, client)):",
        "if False:",
        "unit/test_authenticated_socket.py unit/test_server.py",
    ),
    Mutation(
        "resume: states of another step are loaded",
        "ocomm/training/resume.py",
        "if state[\"steps\"] != driver.steps:",
        "if False:",
        "frontends/test_torch_checkpoint_files.py frontends/test_torch_resume.py",
    ),
    Mutation(
        "resume: a lost state is no reason to start without",
        "ocomm/training/resume.py",
        "if lost and not source.partial:",
        "if False:",
        "frontends/test_torch_checkpoint_files.py frontends/test_torch_resume.py",
    ),
    Mutation(
        "elastic: folders of others are read",
        "ocomm/elastic/folder.py",
        "if status.st_uid != os.geteuid():",
        "if False:",
        "unit/test_folder.py",
    ),
    Mutation(
        "elastic: the oldest commit is chosen",
        "ocomm/elastic/commits.py",
        "if held.replicated}, reverse=True)",
        "if held.replicated})",
        "unit/test_commits.py world/test_elastic_commits.py",
    ),
    Mutation(
        "elastic: checksum without the name",
        "ocomm/elastic/folder.py",
        "sha.update(header[:16] + name.encode())",
        "sha.update(header[:16])",
        "unit/test_folder.py world/test_elastic_commits.py",
    ),
    Mutation(
        "launch: root not allowed",
        "ocomm/launch/command.py",
        "added |= {\"OMPI_ALLOW_RUN_AS_ROOT\": \"1\", \"OMPI_ALLOW_RUN_AS_ROOT_CONFIRM\": \"1\"}",
        "pass",
        "unit/test_launch_command.py",
    ),
    Mutation(
        "launch: cooldown does not double",
        "ocomm/launch/generations.py",
        "first * 2.0 ** (times - 1)",
        "first",
        "unit/test_generations.py",
    ),
    Mutation(
        "launch: a fruitless generation is not counted",
        "ocomm/launch/generations.py",
        "self._fruitless = 0 if self._has_committed else self._fruitless + 1",
        "self._fruitless = 0",
        "unit/test_generations.py",
    ),
    Mutation(
        "MPI: a probe says one byte more",
        "ocomm/transport/mpi.py",
        "status.Get_count(self._mpi.BYTE)",
        "status.Get_count(self._mpi.BYTE) + 1",
        "under mpirun",
    ),
    Mutation(
        "mpi: subset in another order",
        "ocomm/transport/mpi.py",
        "group = everyone.Incl(list(ranks))",
        "group = everyone.Incl(sorted(ranks, reverse=True))",
        "under mpirun",
    ),
    Mutation(
        "MPI: settings of Open MPI are left out",
        "ocomm/transport/mpi.py",
        "wanted = mpi_settings.environment(name, one_host)",
        "wanted = {}",
        "cluster/test_start.py",
    ),
    Mutation(
        "Torch: a changed gradient is not noticed",
        "ocomm_torch/optimizers/averaging.py",
        "            if changed:\n                raise",
        "            if False:\n                raise",
        "frontends/test_torch_edits.py frontends/test_torch_optimizer.py",
    ),
    Mutation(
        "Torch: fp16 overflow is not reduced again",
        "ocomm_torch/optimizers/averaging.py",
        "if not has_overflowed(self._compression, tensors, grads):",
        "if True:",
        "frontends/test_torch_fp16_compression.py",
    ),
    Mutation(
        "Torch: masters keep what was written",
        "ocomm_torch/memory/masters.py",
        "master.copy_(torch.where(written, value, master))",
        "pass",
        "frontends/test_torch_masters.py",
    ),
    Mutation(
        "Keras: kernels are not transposed",
        "ocomm_tf/order.py",
        "return np.ascontiguousarray(array.transpose(self.axes)).reshape(-1)",
        "return np.ascontiguousarray(array).reshape(-1)",
        "frontends/test_tf_mixed.py frontends/test_teams.py",
    ),
    Mutation(
        "Keras: a variable without a gradient keeps its value",
        "ocomm_tf/keras/compressed.py",
        "for variable, result in zip(variables, results, strict=True):",
        "for variable, result in zip(trainable_variables, results, strict=False):",
        PROGRAMS,
    ),
    Mutation(
        "TF: local gradients are not divided",
        "ocomm_tf/averaging.py",
        "if self._scale_local:",
        "if False:",
        "frontends/test_tf_keras.py frontends/test_tf_parity.py",
    ),
    Mutation(
        "dense codes: errors of absent tensors lost",
        "ocomm/optim/dense_codes.py",
        "            self.errors.keep(tensor)\n",
        "            pass\n",
        "frontends/test_torch_dense_bits.py",
    ),
    Mutation(
        "dense codes: errors stay after the freeze",
        "ocomm/optim/onebit_adam.py",
        "            self.dense_codes.drop(self.stage == Stage.COMPRESSED)\n",
        "            pass\n",
        "frontends/test_torch_dense_bits.py",
    ),
    Mutation(
        "codes: the server's error is not added",
        "native/codes_body.h",
        "    if (w->error) FN(add_row)(row, w->error + j, n);\n",
        "    if (w->error && !averages) FN(add_row)(row, w->error + j, n);\n",
        "contract/test_codes.py",
    ),
    Mutation(
        "codes: one scale for a whole block",
        "ocomm/kernels/base.py",
        "GROUP, LEAST = 128, 2.0**-100",
        "GROUP, LEAST = 4096, 2.0**-100",
        "contract/test_codes.py frontends/test_torch_dense_bits.py",
    ),
    Mutation(
        "a part of a grid does not hear the others' flags",
        "ocomm/optim/stepper.py",
        "return VERDICTS[heard]",
        "return outcome",
        "frontends/test_torch_grids.py",
    ),
    Mutation(
        "0/1 Adam: a step without a vote moves a rank whose gradients are not finite",
        "ocomm/optim/zero_one_adam.py",
        "self._take_local_steps(local, moves)",
        "self._take_local_steps(local)",
        "frontends/test_torch_silent_steps.py",
    ),
    Mutation(
        "0/1 Adam: ranks do not compare what they have counted without a vote",
        "ocomm/training/zero_one_adam.py",
        "return (found, *counted) if counted else found",
        "return found",
        "frontends/test_torch_silent_steps.py",
    ),
    Mutation(
        "0/1 Adam: finish() adds the rate of a step that is not taken",
        "ocomm/training/zero_one_adam.py",
        "[replace(group, lr=0.0) for group in self.groups()]",
        "self.groups()",
        "frontends/test_torch_zero_one.py",
    ),
    Mutation(
        "0/1 Adam: finish() exchanges the gradients that backward has left",
        "ocomm/training/zero_one_adam.py",
        "        stepper.buckets.locate_none()\n",
        "",
        "frontends/test_torch_zero_one.py",
    ),
    Mutation(
        "0/1 Adam: finish() does not count as the last sync",
        "ocomm/optim/zero_one_adam.py",
        "            self.syncs.synced(self.step)\n            self.sync_steps += 1\n\n    def commit_silent",
        "            self.sync_steps += 1\n\n    def commit_silent",
        "frontends/test_torch_zero_one.py",
    ),
    Mutation(
        "Keras: finish() leaves the moments of the step before it to those who save",
        "ocomm_tf/keras/zero_one.py",
        "        self._write_moments(int(self.iterations.numpy()))\n",
        "",
        "frontends/test_tf_zero_one.py",
    ),
    Mutation(
        "0/1 Adam: votes compare one part of the replicas, however rare they are",
        "ocomm/optim/stepper.py",
        "range(self._compared + 1, number + 1)",
        "range(number, number + 1)",
        "frontends/test_torch_silent_steps.py",
    ),
    Mutation(
        "DiLoCo: a stage steps while another one of its replica does not",
        "ocomm/training/diloco.py",
        "return not flags & Flag.NON_FINITE",
        "return is_finite",
        "frontends/test_torch_grids.py",
    ),
    Mutation(
        "replicas on other axes count twice in norms",
        "ocomm_torch/mesh.py",
        "return not any(place and is_same for",
        "return not any(False for",
        "frontends/test_torch_grids.py",
    ),
    Mutation(
        "int4: plain errors instead of moving averages",
        "ocomm/optim/low_bit.py",
        "self._averages_errors = options.dense_bits == 4",
        "self._averages_errors = False",
        "frontends/test_torch_low_bit.py",
    ),
    Mutation(
        "codes: a NaN stays with its rank",
        "ocomm_torch/optimizers/low_bit.py",
        "if agreed is StepOutcome.TAKE or self._failure is not None:",
        "if agreed is StepOutcome.TAKE:",
        "frontends/test_torch_low_bit.py",
    ),
    Mutation(
        "a sharded step is taken with averages that are not finite",
        "ocomm/optim/verdict.py",
        "flags & (Flag.NON_FINITE | Flag.AVERAGE)",
        "flags & Flag.NON_FINITE",
        "frontends/test_torch_sharded.py",
    ),
    Mutation(
        "owners step with averages that are not clipped",
        "ocomm/optim/sharded.py",
        "self.average, self.momentum, self.variance, factor)",
        "self.average, self.momentum, self.variance, 1.0)",
        "frontends/test_torch_sharded.py",
    ),
    Mutation(
        "a segment starts while another uses its memory",
        "ocomm/collectives/python_engine.py",
        "_number(s) <= following - lanes",
        "_number(s) < following - lanes",
        "contract/test_engine.py",
    ),
    Mutation(
        "C: segments count as past when they have started",
        "native/engine.c",
        "            past = channel->slots[i].segment;",
        "            past = plan->segments_started;",
        "contract/test_engine.py",
    ),
    Mutation(
        "segments that ended out of order count as past",
        "ocomm/collectives/python_engine.py",
        "min(left, default=ticket.started_segments)",
        "ticket.done_segments",
        "contract/test_engine.py",
    ),
    Mutation(
        "a step is exchanged again without its gradients",
        "ocomm/optim/verdict.py",
        "StepOutcome.REFUSE if flags & Flag.RELEASED else StepOutcome.AGAIN",
        "StepOutcome.AGAIN",
        "frontends/test_torch_free_gradients.py",
    ),
    Mutation(
        "a released gradient that was not finite has no rank",
        "ocomm/optim/buckets.py",
        "self.had_non_finite |= not np.isfinite(squares).all()",
        "self.had_non_finite |= False",
        "frontends/test_torch_free_gradients.py",
    ),
    Mutation(
        "an optimizer whose moments ocomm keeps seems to have no state",
        "ocomm_torch/optimizers/rank_states.py",
        "        return True",
        "        return bool(len(self))",
        "frontends/test_torch_checkpoint_files.py",
    ),
    Mutation(
        "a copy of a gradient is read before it is there",
        "ocomm_torch/memory/gradients.py",
        "            elif not event.is_over():",
        "            elif event is None:",
        "frontends/test_torch_offload.py",
    ),
    Mutation(
        "a copy is overwritten while another bucket reads it",
        "ocomm_torch/memory/gradients.py",
        "(index in self._fetched and (not final or is_posted(index)))",
        "(index in self._fetched and not final)",
        "frontends/test_torch_offload.py",
    ),
    Mutation(
        "what is written to a parameter that is elsewhere is lost",
        "ocomm_torch/memory/masters.py",
        "        written = ~_rounds_to(master, parameter)\n        if not written.any():",
        "        written = ~_rounds_to(master, parameter)\n        if self._placement.offloads or not written.any():",
        "frontends/test_torch_offload.py",
    ),
    Mutation(
        "a rank announces what is queued behind its departure",
        "ocomm/runtime/process_set.py",
        "        if not self._queue or self.link.has_left:",
        "        if not self._queue:",
        "world/test_runtime.py",
    ),
    Mutation(
        "a departure overtakes what was kept on the way",
        "ocomm/runtime/background.py",
        "        world.link.before_departure = self._pass_on_all\n",
        "",
        "world/test_runtime.py",
    ),
    Mutation(
        "rank 0 speaks behind the last departure",
        "ocomm/runtime/background.py",
        "                process_set.link.have_all_left = True",
        "                process_set.link.have_all_left = False",
        "world/test_runtime.py",
    ),
    Mutation(
        "replicas are compared in the first gradient's hook",
        "ocomm/training/driver.py",
        "        if starts and not early:",
        "        if starts:",
        "frontends/test_torch_drift.py",
    ),
    Mutation(
        "an in-place collective keeps a tensor's version",
        "ocomm_torch/mpi_ops.py",
        "            torch.autograd.graph.increment_version(tensor)",
        "            pass",
        "frontends/test_torch_ops.py",
    ),
    Mutation(
        "Keras' accumulated gradients are broadcast",
        "ocomm_tf/keras/callbacks.py",
        "            own = {id(v) for o in self.optimizers for v in accumulators(o)}",
        "            own: set[int] = set()",
        "frontends/test_tf_keras.py",
    ),
    Mutation(
        "a spawned child that runs the script again is a rank",
        "ocomm/bootstrap.py",
        "    return is_importing or multiprocessing.parent_process() is not None",
        "    return multiprocessing.parent_process() is not None",
        "cluster/test_failures.py",
    ),
    Mutation(
        "memory is freed in a CUDA graph's way",
        "ocomm/kernels/cuda_driver.py",
        "        with contextlib.suppress(HorovodInternalError), context.current(), _beside_captures():",
        "        with contextlib.suppress(HorovodInternalError), context.current():",
        "unit/test_cuda_device.py",
    ),
    Mutation(
        "Keras' elastic state gives all ranks the first one's variables",
        "ocomm_tf/elastic.py",
        "            if self._onebit is None or len(common) == 1:",
        "            if self._onebit is None:",
        "frontends/test_tf_elastic.py",
    ),
    Mutation(
        "a loss scale outside is not seen behind torch's frames",
        "ocomm_tf/keras_optimizer.py",
        '.startswith(("torch.", "tensorflow.")):',
        '.startswith(("jax.", "tensorflow.")):',
        "frontends/test_tf_keras_on_torch.py",
    ),
    Mutation(
        "DiLoCo's anchors leave the constraints of variables",
        "ocomm/training/diloco.py",
        "self._constraints.keys() & set(core.traveling)",
        "self._constraints.keys() & set(core.buffers)",
        "frontends/test_tf_diloco.py",
    ),
    Mutation(
        "launch: what ranks have said last is not heard",
        "ocomm/launch/job.py",
        "while self._listen(server) or (",
        "while not self._listen(server) and (",
        "unit/test_supervisor.py",
    ),
    Mutation(
        "launch: a launcher whose rank has died may run for ever",
        "ocomm/launch/reports.py",
        "if self.failed or has_died:",
        "if self.failed:",
        "unit/test_reports.py",
    ),
    Mutation(
        "launch: the children of a discovery script that hangs are not killed",
        "ocomm/launch/discovery.py",
        "start_new_session=True,  # so that it can be ended",
        "# so that it can be ended",
        "unit/test_supervisor.py",
    ),
    Mutation(
        "optim: what was gathered is not checked",
        "ocomm/optim/flows.py",
        "cut[-1].compute += core.check_averages(k, self._result_flags)",
        "pass",
        "frontends/test_torch_onebit.py",
    ),
    Mutation(
        "optim: what a check has found stays found",
        "ocomm/optim/flows.py",
        "self._result_flags[0] = 0",
        "pass",
        "frontends/test_torch_onebit.py",
    ),
    Mutation(
        "optim: a plan outlives what it writes to",
        "ocomm/optim/flows.py",
        "self.keeps: list[Any] = [core]",
        "self.keeps: list[Any] = [core.borrowed]",
        PROGRAMS,
    ),
    Mutation(
        "optim: headers are read in lanes that were used again",
        "ocomm/optim/non_finite.py",
        "for flow in flows if flow.says_whose for h",
        "for flow in flows for h",
        PROGRAMS,
    ),
    Mutation(
        "Torch: a coupled decay of a parameter that was written is kept",
        "ocomm_torch/optimizers/compressed.py",
        "if self._gradients.decayed.noted and self._gradients.decayed.have_changed():",
        "if False:",
        PROGRAMS,
    ),
    Mutation(
        "Torch: masters follow what is written for a backward pass",
        "ocomm_torch/optimizers/compressed.py",
        "        self._driver.begin(early)\n",
        "        self._driver.begin(early)\n        self._masters.follow()\n",
        PROGRAMS,
    ),
    Mutation(
        "Torch: in codes, what is written after backward is lost",
        "ocomm_torch/optimizers/low_bit.py",
        "            self._masters.look()\n            self._masters.take()\n",
        "",
        PROGRAMS,
    ),
    Mutation(
        "Torch: in codes, replicas are compared at the end of backward",
        "ocomm/training/low_bit.py",
        "        self.stepper.noted_replica = 0\n",
        "",
        PROGRAMS,
    ),
    Mutation(
        "Torch: the ranks compare masters before these follow",
        "ocomm_torch/optimizers/compressed.py",
        "            self._take_written()\n        if self._gradients.decayed",
        "            if not self._stepper.begun:\n                self._begin()\n"
        "            self._take_written()\n        if self._gradients.decayed",
        PROGRAMS,
    ),
    Mutation(
        "optim: headers say what gradients are compressed with",
        "ocomm/optim/buckets.py",
        "flow.segment_headers.begin(step + 1, attempt)",
        "flow.segment_headers.begin(step + 1, attempt, int(1e9 * float(flows.core.tensors[\"weight_decay\"].sum())))",
        PROGRAMS,
    ),
    Mutation(
        "names in a graph have the scopes of Keras",
        "ocomm_tf/engine.py",
        "contextlib.nullcontext() if call.name else graph.name_scope(None)",
        "contextlib.nullcontext()",
        "frontends/test_tf_ops.py",
    ),
    Mutation(
        "training: moments of a plain Adam are not compared at step 0",
        "ocomm/training/driver.py",
        "if self.steps or self.core.steps.any():",
        "if self.steps:",
        "frontends/test_torch_warm_start.py",
    ),
    Mutation(
        "training: moments are not compared before the first step",
        "ocomm/training/adam.py",
        "found.append((f\"moments of '{spec.name}'\", moments))",
        "pass",
        "frontends/test_torch_warm_start.py frontends/test_tf_mixed.py",
    ),
]
# fmt: on


def build(tree: Path) -> None:
    """The extension, in place."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(command, cwd=tree, env=environment(tree), check=True, capture_output=True)


def environment(tree: Path) -> dict[str, str]:
    """For tests in the copy."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**os.environ, **root, "PYTHONPATH": str(tree)}


def failing(tree: Path, tests: str, tier: str) -> str:
    """The first test of a tier that fails, "" if none does."""
    flags = ["-x", "-q", "--no-header", "--color=no", "-p", "no:cacheprovider", "-m", tier]
    command, env = [sys.executable, "-m", "pytest", *flags], environment(tree)
    if tests == MPI:
        mpirun = str(Path(sys.executable).with_name("mpirun"))
        command = [mpirun, "--oversubscribe", "--bind-to", "none", "-np", "2", *command, "--capture=no"]
        tests, env = ON_TWO_RANKS, {**env, "TEST_MPI_SIZE": "2"}
    files = [f"tests/{name}" for name in tests.split()]
    try:
        done = subprocess.run(
            [*command, *files], cwd=tree, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "out of time"
    if done.returncode in (0, 5):  # all passed, or there is none in this tier
        return ""
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    # A rank that fails under mpirun ends the job with its stack, before pytest sums up.
    found = found or re.search(r'File "\S*/(tests/\S+)", line \d+, in body', done.stdout + done.stderr)
    return found[1] if found else f"exit code {done.returncode}"


def result(tree: Path, mutation: Mutation, by_laws: bool) -> str:
    """What becomes of it; the copy is left as it was."""
    path = tree / mutation.file
    text = path.read_text()
    built = {library: library.read_bytes() for library in tree.glob("ocomm*/**/*.so")}
    assert text.count(mutation.old) == 1, f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times"
    is_native = mutation.file.startswith("native")
    path.write_text(text.replace(mutation.old, mutation.new))
    try:
        if is_native:
            build(tree)
        if by_laws:
            return noticed_by_laws(tree, mutation) or "missed"
        if found := failing(tree, mutation.tests, "not long"):
            return found
        return "missed, but for the long tier" if failing(tree, mutation.tests, "long") else "missed"
    finally:
        path.write_text(text)
        for library, content in built.items():
            library.write_bytes(content)


def kinds_of(mutation: Mutation) -> tuple[str, ...]:
    """The kinds of random programs that should notice a fault; none if it is elsewhere."""
    return next((kinds for folder, kinds in LAWS.items() if mutation.file.startswith(f"{folder}/")), ())


def noticed_by_laws(tree: Path, mutation: Mutation) -> str:
    """Which kind of random programs fails in the copy, and after how many; "" if none does. Those that once failed come
    first, then 40, then 300 of each kind, as far as the limit of time allows.
    """
    python = [sys.executable, "-m"]
    once = [*python, "pytest", "-x", "-q", "-p", "no:cacheprovider", f"tests/{PROGRAMS}", "-k"]
    for count in ("", "40", "300"):
        for kind in kinds_of(mutation):
            drawn = [*python, "tests.programs", kind, "--programs", count, "--seed", count, "--first"]
            command = drawn if count else [*once, f"once_failed and {kind}"]
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(
                    command, cwd=tree, env=environment(tree), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                    timeout=LIMIT_S,
                )  # fmt: skip
                if done.returncode not in (0, 5):
                    return f"{kind}, {f'of {count}' if count else 'one that once failed'}"
    return ""


def main() -> int:
    by_laws = sys.argv[1:2] == ["--laws"]
    chosen = [int(text) for text in sys.argv[1 + by_laws :]] or range(len(MUTATIONS))
    if by_laws:
        chosen = [number for number in chosen if kinds_of(MUTATIONS[number])]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "ocomm"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", "bench-output"))
        for number in chosen:
            found = result(tree, MUTATIONS[number], by_laws)
            missed += found.startswith("missed")
            print(f"{number:3}  {MUTATIONS[number].name}: {found}", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
