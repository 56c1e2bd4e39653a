# make demo, make test: the two commands of the README; make test-fast for whoever changes ocomm. Everything they need is installed into .venv first.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP_ARGS ?=
# As root on one small machine; harmless elsewhere.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
# Where it is set each of some hundred processes compiles what it imports, and each worker of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE
MPIRUN := timeout 1800 $(VENV)/bin/mpirun --oversubscribe --bind-to none

.PHONY: demo docs test-fast test test-long test-gpu test-mpich test-intel-mpi test-system-mpi test-slurm test-sanitize fuzz check bench convergence time-to-loss soak clean install wheel test-install

install: $(STAMP)

$(STAMP): setup.py pyproject.toml native/build.py native/*.c native/*.h ocomm/kernels/loops.py tools/install.sh
	PIP_ARGS='$(PIP_ARGS)' bash tools/install.sh $(VENV)
	touch $@

# The documentation as a site in site/, without a broken link or reference; then the scripts that stand in it are run.
docs: $(STAMP)-docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	$(PY) -m pytest -q tests/architecture/test_docs.py tests/cluster/test_doc_blocks.py

$(STAMP)-docs: $(STAMP)
	$(PY) -m pip install -q $(PIP_ARGS) -e '.[docs]' && touch $@

# Wheels that need no compiler, and what they were installed with (docs/installing.md). Some hundred megabytes each.
wheel:
	PIP_ARGS='$(PIP_ARGS)' bash tools/wheel.sh dist

test-install: wheel
	python3 tools/install_matrix.py dist/ocomm-*-manylinux_2_28_$$(uname -m).whl --into docs/installing.md

demo: install
	$(PY) -m ocomm.launch -np 2 $(PY) examples/torch_digits.py

# The compiler of the CUDA kernels, 180 MB; without it tests/contract/test_ptx.py is skipped. No device is needed.
$(STAMP)-ptx: $(STAMP)
	$(PY) -m pip install -q $(PIP_ARGS) 'cuda-toolkit[nvcc,nvrtc,nvvm]<14' && touch $@ || echo 'CUDA kernels are not compiled'

# Lightning, transformers, Accelerate and Ignite, 200 MB, and Ray with pyarrow and pandas, 500 MB on the disk, for the long
# tier; without them tests/cluster/test_lightning.py, test_transformers.py, test_ignite.py and test_ray.py are skipped.
$(STAMP)-trainers: $(STAMP)
	$(PY) -m pip install -q $(PIP_ARGS) -e '.[lightning,transformers,ray]' pytorch-ignite && touch $@ || echo 'trainers are not tested'

# Three tiers, which CONTRIBUTING.md describes. Every test is in `test` or in `test-long`.
#
# Ranks are threads of one process, and share its one lock; a job that a test starts is waited for. Four processes keep two
# cores busy. Where one of them has nothing left to do, it takes over half of what another has not begun.
TOGETHER := -q -n 4 --dist worksteal --durations=20 --durations-min=5
#: Laws and contracts: no framework trains, and no job is started.
FAST := tests/unit tests/contract tests/architecture --ignore=tests/architecture/test_examples.py \
    --ignore=tests/contract/test_ptx.py
# The CUDA kernels in numba's simulator: a run of its own, because numba reads the variable when it is imported.
SIMULATED := tests/contract/test_cuda.py tests/frontends/test_torch_cuda.py
# What processes and MPI itself can show and threads cannot, a file for each subject: messages, collectives, the runtime,
# process sets, compiled steps, the optimizers' exchange, devices, nodes.
ON_TWO_RANKS := tests/contract/test_transport.py tests/world/test_collectives.py tests/world/test_runtime.py \
    tests/frontends/test_torch_compile.py tests/frontends/test_torch_lion.py
ON_FOUR_RANKS := tests/contract/test_transport.py tests/world/test_hierarchical.py tests/world/test_process_sets.py
# TensorFlow's tests run in jobs of their own: what a graph leaves behind is collected in some later test, and was once
# seen to keep a rank there for longer than the others wait.
TF_ON_TWO_RANKS := tests/frontends/test_tf_ops.py
WITH_TF := $(wildcard tests/frontends/test_tf_*.py) tests/frontends/test_teams.py
WITHOUT_TF := tests/contract/test_transport.py tests/world tests/frontends tests/programs/test_on_mpi.py $(addprefix --ignore=,$(WITH_TF))
#: Where marker `alone` is, without importing all other tests.
ALONE := tests/cluster
#: $(call under_mpirun,ranks,files and flags). The launcher has its folder in a place of its own: where one was killed, a
#: later one that gets its number does not start.
under_mpirun = mkdir -p build/mpirun && PRTE_MCA_prte_tmpdir_base=$(CURDIR)/build/mpirun TEST_MPI_SIZE=$(1) $(MPIRUN) -np $(1) $(PY) -m pytest -q --capture=no --no-header $(2) </dev/null

#: Kinds of random programs whose ranks are threads; those of trainers are tests.
PROGRAMS := collectives torch_compressed torch_dense torch_diloco torch_distributed

test-fast: install
	$(PY) -m pytest $(TOGETHER) -m 'not alone and not long' $(FAST)

test: install
	$(PY) -m pytest $(TOGETHER) -m 'not alone and not long' tests
	$(PY) -m pytest -q -m 'alone and not long' $(ALONE)
	NUMBA_ENABLE_CUDASIM=1 $(PY) -m pytest $(TOGETHER) --no-header -m 'not long' $(SIMULATED)
	$(call under_mpirun,2,-m 'not long' $(ON_TWO_RANKS))
	$(call under_mpirun,2,-m 'not long' $(TF_ON_TWO_RANKS))
	$(call under_mpirun,4,-m 'not long' $(ON_FOUR_RANKS))

# What is too long for every change: whole matrices, repeats, jobs of minutes, and everything under mpirun. Before a
# release, and before an issue is closed.
test-long: install $(STAMP)-ptx $(STAMP)-trainers $(VENV)-mpich/bin/mpiexec
	timeout 3600 $(PY) -m pytest $(TOGETHER) --timeout=1800 -m 'long and not alone' tests
	timeout 1800 $(PY) -m pytest -q --timeout=1800 -m 'long and alone' $(ALONE)
	NUMBA_ENABLE_CUDASIM=1 timeout 1800 $(PY) -m pytest $(TOGETHER) --no-header $(SIMULATED)
	for kind in $(PROGRAMS); do timeout 3600 $(PY) -m tests.programs $$kind --programs 2000 || exit 1; done
	for n in 2 4; do \
	    $(call under_mpirun,$$n,--timeout=900 $(WITHOUT_TF)) && \
	    $(call under_mpirun,$$n,--timeout=900 $(WITH_TF)) || exit 1; \
	done

# On a GPU, which needs a Torch that can use it for the training: the kernels equal the reference and obey the laws of
# all kernels; training equals that in the host's memory, on one rank and on several that share the GPU; nothing outside
# a buffer is touched and no threads race; then speed. Without a GPU all is skipped, with the reason. docs/gpu.md says
# how tools/gpu_day.sh runs without make in an environment of its own, and what it measures. test-gpu-NAME is one part.
GPU_PARTS := kernels training ranks tensorflow sanitizer speed
test-gpu: install
	PY=$(PY) MPIRUN='$(MPIRUN)' PART_SECONDS=3600 bash tools/gpu_day.sh gpu-output $(GPU_PARTS)
$(GPU_PARTS:%=test-gpu-%): test-gpu-%: install
	PY=$(PY) MPIRUN='$(MPIRUN)' PART_SECONDS=3600 bash tools/gpu_day.sh gpu-output $*

# The same extension and mpi4py under another MPI, which has an environment of its own: two MPIs in one get in each
# other's way.
WHEEL_OF_mpich := mpich
WHEEL_OF_intel-mpi := impi-rt
$(VENV)-%/bin/mpiexec:
	python3 -m venv $(VENV)-$* && $(VENV)-$*/bin/pip install -q $(PIP_ARGS) $(WHEEL_OF_$*)

# Intel MPI binds each rank to its part of the cores unless it is told not to.
test-mpich test-intel-mpi: test-%: install $(VENV)-%/bin/mpiexec
	TEST_MPICH=$(CURDIR)/$(VENV)-$* timeout 1800 $(PY) -m pytest -q tests/cluster/test_torchrun.py tests/cluster/test_ocommrun_mpich.py
	for n in 2 4; do for tests in '$(WITHOUT_TF)' '$(WITH_TF)'; do \
	    MPI4PY_MPIABI=mpich LD_LIBRARY_PATH=$(CURDIR)/$(VENV)-$*/lib I_MPI_PIN=0 TEST_MPI_SIZE=$$n \
	    timeout 1200 $(VENV)-$*/bin/mpiexec -n $$n $(PY) -m pytest -q --capture=no --no-header --timeout=900 \
	        $$tests </dev/null || exit 1; \
	done; done

# Jobs by the mpirun of the system, such as Open MPI 4 of Debian 12 and Ubuntu 24.04 (apt install openmpi-bin), with the
# packages of $(VENV).
SYSTEM_MPIRUN ?= /usr/bin/mpirun
$(VENV)-system/bin/mpirun: $(STAMP)
	python3 -m venv --without-pip $(VENV)-system
	$(PY) -c 'import sysconfig; print("$(CURDIR)", sysconfig.get_path("purelib"), sep="\n")' \
	    > $$($(VENV)-system/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth
	printf '#!/bin/sh\nexec $(SYSTEM_MPIRUN) "$$@"\n' > $@ && chmod +x $@

test-system-mpi: $(VENV)-system/bin/mpirun
	$(VENV)-system/bin/python -m pytest $(TOGETHER) -m 'not alone and not long' tests/cluster
	$(VENV)-system/bin/python -m pytest -q -m 'alone and not long' tests/cluster
	TEST_MPI_SIZE=2 timeout 1800 $(VENV)-system/bin/mpirun --oversubscribe --bind-to none -np 2 \
	    $(VENV)-system/bin/python -m pytest -q --capture=no --no-header -m 'not long' $(ON_TWO_RANKS) </dev/null

# Jobs under Debian's Slurm, on two nodes in namespaces of this machine: a minute, as root.
test-slurm: install
	bash tools/slurm_lab.sh fetch
	TEST_SLURM=1 timeout 900 $(PY) -m pytest -q tests/cluster/test_slurm.py

# The C code under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: ten minutes on two cores.
test-sanitize: install
	bash tools/sanitize.sh address $(PY)
	bash tools/sanitize.sh thread $(PY)

# What is read from other ranks, connections and files, damaged in new ways each time; seconds for each of three targets.
FUZZ_SECONDS := 120
fuzz: install
	bash tools/fuzz.sh $(FUZZ_SECONDS) $(PY)

# Whether memory, descriptors, threads or files grow in 10^5 steps of each optimizer, and in an hour of an elastic job one
# of whose ranks is killed every minute: an hour and a half. SOAK='--steps 10000 --minutes 10' is shorter.
SOAK := --steps 100000 --minutes 60
soak: install
	mkdir -p $(BENCH)
	$(PY) -m tests.cluster.soak $(SOAK) --output $(BENCH)/soak.md

check: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) tools/prose.py

# Some minutes each; quieter machines give better figures. BENCH=benchmarks/results renews those that are published.
BENCH := bench-output
bench: install
	mkdir -p $(BENCH)
	$(PY) -m ocomm.bench kernels
	$(PY) -m ocomm.launch -np 2 $(PY) -m ocomm.bench runtime
	# 77: a machine that cannot have a lab of several hosts; the reason is printed
	$(PY) -m ocomm.bench allreduce --hosts 4 --rate 1gbit || test $$? = 77
	$(PY) -m ocomm.bench allreduce --hosts 4 --rate 100mbit --operations packed compressed || test $$? = 77
	$(PY) -m benchmarks.step --hosts 2 --rate 160mbit 400mbit 850mbit 2gbit --json $(BENCH)/step-2hosts.json || test $$? = 77
	$(PY) -m benchmarks.step --hosts 4 --rate 120mbit 680mbit --json $(BENCH)/step-4hosts.json || test $$? = 77
	$(PY) -m benchmarks.step --hosts 2 --rate 160mbit 850mbit --clip 0.5 --json $(BENCH)/step-2hosts-clipped.json || test $$? = 77
	$(PY) -m benchmarks.step --hosts 2 --rate 160mbit 850mbit --model resnet --json $(BENCH)/step-2hosts-resnet.json || test $$? = 77
	$(PY) -m benchmarks.step --hosts 2 --slots 2 --rate 160mbit 850mbit --methods ddp dense dense-flat onebit onebit-flat \
	    --json $(BENCH)/step-2hosts-slots.json || test $$? = 77
	$(PY) -m benchmarks.step --hosts 2 --rate 160mbit 850mbit --methods ddp ddp-fp16 ddp-bf16 ddp-int8 dense int8 int4 onebit \
	    --json $(BENCH)/step-2hosts-codes.json || test $$? = 77
	$(PY) -m benchmarks.trainers --hosts 2 --rate 160mbit --json $(BENCH)/trainers-2hosts.json || test $$? = 77
	$(PY) -m benchmarks.launchers --hosts 2 --rate 850mbit --pairs 10 --json $(BENCH)/launchers-2hosts.json || test $$? = 77
	$(PY) -m benchmarks.keras_step --hosts 2 --rate 160mbit --json $(BENCH)/keras-step-2hosts.json || test $$? = 77
	$(PY) -m benchmarks.step_profile --hosts 2 --rate 850mbit 160mbit --json $(BENCH)/profile-2hosts.json || test $$? = 77
	$(PY) -m benchmarks.sparse_attention --into $(BENCH)
	$(PY) -m benchmarks.plots --into $(BENCH)
	$(PY) -m benchmarks.tables --into $(BENCH)

# Every optimizer against tuned Adam on real text and images, three seeds; tries the grids first where that has not been
# done, or with TUNE=--tune.
convergence: install
	$(PY) -c 'import tokenizers' 2>/dev/null || $(PY) -m pip install -q $(PIP_ARGS) -e '.[convergence]'
	PIP_ARGS='$(PIP_ARGS)' $(PY) -m ocomm.launch -np 4 $(PY) -m benchmarks.convergence $(TUNE)

# Seconds to a loss at each rate and delay, from the runs and step times that are stored; with FULL=1 what is missing is
# measured first: the runs take a day on two cores, and go on where they were interrupted.
TO_LOSS := benchmarks/results/time-to-loss
time-to-loss: install
ifdef FULL
	$(PY) -c 'import tokenizers' 2>/dev/null || $(PY) -m pip install -q $(PIP_ARGS) -e '.[convergence]'
	PIP_ARGS='$(PIP_ARGS)' $(PY) -m ocomm.launch -np 4 $(PY) -m benchmarks.time_to_loss.losses
	$(PY) -m benchmarks.time_to_loss.steps
endif
	$(PY) -m benchmarks.time_to_loss --into $(TO_LOSS)

clean:
	rm -rf $(VENV) build *.egg-info ocomm/_native*.so ocomm/launch/_loopback*.so
