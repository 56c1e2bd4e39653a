"""The command lines, word by word, for every launcher."""

from __future__ import annotations

import ast
import itertools
import os
import shlex
import subprocess
import sys

import pytest

from ocomm.errors import LaunchError
from ocomm.launch.command import CommandLine, LaunchRequest, build, exported_names
from ocomm.launch.flavour import Flavour, Launcher
from ocomm.launch.hosts import parse_hosts
from ocomm.torch_variables import exports

OPEN_MPI_4 = Launcher(Flavour.OPEN_MPI_4, "/x/mpirun", "4.1.4")
OPEN_MPI_5 = Launcher(Flavour.OPEN_MPI_5, "/x/mpirun", "5.0.11")
MPICH = Launcher(Flavour.MPICH, "/x/mpirun", "5.0.2")
INTEL_MPI = Launcher(Flavour.INTEL_MPI, "/x/mpiexec.hydra", "2021.18.1")
SRUN = Launcher(Flavour.SRUN, "/x/srun", "23.11.4")
TUNING = (
    "--mca btl_tcp_links 2 --mca btl_tcp_eager_limit 1048576 --mca btl_tcp_rndv_eager_limit 1048576 "
    "--mca btl_tcp_max_send_size 1048576 --mca mpi_yield_when_idle 1 --mca opal_abort_delay 5"
)
#: Hydra loses the variable in the last place of the environment on its way to other hosts.
LAST = {"_OCOMM_LAST": ""}
ON_ONE_HOST = {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
WITHOUT_POSIX = {"UCX_TLS": "^posix"}
NO_INPUT = """sh -c 'exec "$0" "$@" </dev/null'"""


def local(**changes) -> LaunchRequest:
    """Two ranks on this machine, as ``ocommrun -np 2 python train.py`` asks for them."""
    values = {
        "num_proc": 2,
        "command": ("python", "train.py"),
        "hosts": parse_hosts("localhost:2"),
        "num_cores": 8,
    }
    return LaunchRequest(**{**values, **changes})


def remote(**changes) -> LaunchRequest:
    """Three ranks on two hosts, with a flag of every kind that all launchers take."""
    values = {
        "num_proc": 3,
        "hosts": parse_hosts("localhost:2,b:2"),
        "spans_hosts": True,
        "hostname": "a",
        "environ": {"PATH": "/bin", "HOSTNAME": "a", "HOROVOD_CYCLE_TIME": "5"},
        "settings": {"OCOMM_CYCLE_TIME": "2"},
        "interfaces": ("eth1",),
        "output_directory": "/out",
    }
    return local(**{**values, **changes})


def words(line: str) -> tuple[str, ...]:
    return tuple(shlex.split(line))


def test_open_mpi_5_on_this_machine():
    assert build(local(), OPEN_MPI_5) == CommandLine(
        words(
            "/x/mpirun -np 2 -H localhost:2 --bind-to none --map-by slot --stdin none --output tag "
            f"--mca pml ob1 --mca btl self,sm {TUNING} python train.py"
        ),
        {},
        may_hang=True,
    )


@pytest.mark.parametrize("arguments", ["-H a:2", "--host a", "-machinefile hosts", "--hostfile hosts"])
def test_only_where_all_ranks_are_its_own_processes_a_launcher_may_be_ended_once_it_has_none(arguments):
    assert build(local(mpi_args=words("--mca pml ucx")), OPEN_MPI_5).may_hang
    assert not build(local(mpi_args=words(arguments)), OPEN_MPI_5).may_hang
    assert not build(remote(), OPEN_MPI_5).may_hang


def test_open_mpi_4_on_this_machine():
    assert build(local(), OPEN_MPI_4) == CommandLine(
        words(
            "/x/mpirun -np 2 -H localhost:2 --bind-to none --map-by slot --stdin none --tag-output "
            f"--mca pml ob1 --mca btl self,vader {TUNING} python train.py"
        ),
        {},
    )


@pytest.mark.parametrize(
    ("environ", "named"),
    [({}, "localhost:1,a:5,b:2"), ({"PBS_NODEFILE": "nodes"}, "localhost:1,A.example:2,10.0.0.1:2,a:1,b:2")],
    ids=["by hand", "in an allocation"],
)
def test_open_mpi_knows_this_machine_by_one_name(environ, named):
    request = remote(
        num_proc=8,
        hosts=parse_hosts("localhost:1,A.example:2,10.0.0.1:2,a:1,b:2"),
        own_names=frozenset({"localhost", "A.example", "10.0.0.1", "a"}),
        environ=environ,
    )
    argv = build(request, OPEN_MPI_5).argv
    assert argv[argv.index("-H") + 1] == named


def test_open_mpi_5_over_hosts():
    request = remote(ssh_port=2222, ssh_identity_file="my key", prefix_timestamp=True)
    assert build(request, OPEN_MPI_5) == CommandLine(
        words(
            "/x/mpirun -np 3 -H localhost:2,b:2 --bind-to none --map-by slot --stdin none "
            f"--output tag,timestamp,dir=/out --mca pml ob1 --mca btl tcp,self,sm {TUNING} "
            "--mca btl_tcp_if_include eth1 "
            """--prtemca prte_if_include eth1 --prtemca plm_ssh_args "-p 2222 -i 'my key'" """
            "-x HOROVOD_CYCLE_TIME -x NCCL_SOCKET_IFNAME -x OCOMM_CYCLE_TIME -x PATH python train.py"
        ),
        {"OCOMM_CYCLE_TIME": "2", "NCCL_SOCKET_IFNAME": "eth1"},
    )


def test_open_mpi_4_over_hosts():
    request = remote(ssh_port=2222, ssh_identity_file="my key", prefix_timestamp=True)
    assert build(request, OPEN_MPI_4) == CommandLine(
        words(
            "/x/mpirun -np 3 -H localhost:2,b:2 --bind-to none --map-by slot --stdin none --tag-output "
            "--timestamp-output --output-filename /out --mca pml ob1 --mca btl tcp,self,vader "
            f"{TUNING} --mca btl_tcp_if_include eth1 "
            """--mca oob_tcp_if_include eth1 --mca plm_rsh_args "-p 2222 -i 'my key'" """
            "-x HOROVOD_CYCLE_TIME -x NCCL_SOCKET_IFNAME -x OCOMM_CYCLE_TIME -x PATH python train.py"
        ),
        {"OCOMM_CYCLE_TIME": "2", "NCCL_SOCKET_IFNAME": "eth1"},
    )


def test_mpich_on_this_machine():
    expected = words(f"/x/mpirun -n 2 -hosts localhost:2 -prepend-rank {NO_INPUT} python train.py")
    assert build(local(), MPICH) == CommandLine(expected, {**WITHOUT_POSIX, **ON_ONE_HOST})


def test_mpich_over_hosts_calls_this_one_by_a_name_that_the_others_know():
    assert build(remote(ssh_port=2222), MPICH) == CommandLine(
        words(
            "/x/mpirun -n 3 -hosts a:2,b:1 -prepend-rank -outfile-pattern /out/rank.%r.out -errfile-pattern "
            "/out/rank.%r.err -iface eth1 -genvlist HOROVOD_CYCLE_TIME,HYDRA_LAUNCHER_EXTRA_ARGS,NCCL_SOCKET_IFNAME,"
            f"OCOMM_CYCLE_TIME,PATH,UCX_TLS {NO_INPUT} python train.py"
        ),
        {
            "OCOMM_CYCLE_TIME": "2",
            "NCCL_SOCKET_IFNAME": "eth1",
            "HYDRA_LAUNCHER_EXTRA_ARGS": "-p 2222",
            **WITHOUT_POSIX,
            **LAST,
        },
        "/out",
    )


def test_intel_mpi_on_this_machine():
    expected = words(f"/x/mpiexec.hydra -prepend-rank -host localhost -n 2 {NO_INPUT} python train.py")
    assert build(local(), INTEL_MPI) == CommandLine(expected, {**ON_ONE_HOST, "I_MPI_PIN": "0"})


@pytest.mark.parametrize(
    "own",
    [
        {"environ": {"I_MPI_PIN_DOMAIN": "socket"}},
        {"binding_args": ("-genv", "I_MPI_PIN", "1")},
        {"mpi_args": ("-genv", "I_MPI_PIN_DOMAIN", "socket")},
        {"mpi_args": ("-genv", "I_MPI_PIN_DOMAIN=socket")},
    ],
)
def test_intel_mpi_binds_ranks_to_cores_as_the_user_says(own):
    assert "I_MPI_PIN" not in build(local(**own), INTEL_MPI).added_environ


def test_intel_mpi_over_hosts_has_a_set_of_arguments_for_each():
    assert build(remote(ssh_port=2222), INTEL_MPI) == CommandLine(
        words(
            "/x/mpiexec.hydra -prepend-rank -outfile-pattern /out/rank.%r.out -errfile-pattern /out/rank.%r.err "
            "-iface eth1 -bootstrap-exec-args '-p 2222' -genvlist HOROVOD_CYCLE_TIME,I_MPI_PIN,NCCL_SOCKET_IFNAME,"
            f"OCOMM_CYCLE_TIME,PATH -host a -n 2 {NO_INPUT} python train.py : -host b -n 1 {NO_INPUT} python train.py"
        ),
        {"OCOMM_CYCLE_TIME": "2", "NCCL_SOCKET_IFNAME": "eth1", "I_MPI_PIN": "0", **LAST},
        "/out",
    )


def test_srun_sets_open_mpi_through_the_environment():
    request = local(hosts=(), spans_hosts=True, library_family="Open MPI", settings={"OCOMM_CYCLE_TIME": "2"})
    assert build(request, SRUN) == CommandLine(
        words(
            "/x/srun --ntasks=2 --mpi=pmix --kill-on-bad-exit=1 --quit-on-interrupt --input=none --export=ALL --label "
            "--cpu-bind=none python train.py"
        ),
        {
            "OCOMM_CYCLE_TIME": "2",
            "OMPI_MCA_pml": "ob1",
            "OMPI_MCA_btl": "tcp,self,vader",
            "OMPI_MCA_btl_tcp_links": "2",
            "OMPI_MCA_btl_tcp_eager_limit": "1048576",
            "OMPI_MCA_btl_tcp_rndv_eager_limit": "1048576",
            "OMPI_MCA_btl_tcp_max_send_size": "1048576",
            "OMPI_MCA_mpi_yield_when_idle": "1",
            "OMPI_MCA_opal_abort_delay": "5",
            "SLURM_PMIX_FENCE": "ring",
        },
    )
    request = local(hosts=(), library_family="Open MPI", environ={"SLURM_PMIX_FENCE": "tree"})
    assert "SLURM_PMIX_FENCE" not in build(request, SRUN).added_environ


def test_srun_puts_the_same_number_of_ranks_on_each_host_that_is_named():
    request = local(num_proc=4, hosts=parse_hosts("a:2,b:2"), spans_hosts=True, library_family="MPICH")
    assert build(request, SRUN).argv == words(
        "/x/srun --ntasks=4 --nodelist=a,b --nodes=2 --ntasks-per-node=2 --mpi=pmi2 --kill-on-bad-exit=1 "
        "--quit-on-interrupt --input=none --export=ALL --label --cpu-bind=none python train.py"
    )
    assert build(request, SRUN).added_environ == WITHOUT_POSIX


def test_in_an_allocation_open_mpi_asks_the_batch_system_for_the_hosts():
    argv = build(local(hosts=(), spans_hosts=True), OPEN_MPI_5).argv
    assert argv[:4] == ("/x/mpirun", "-np", "2", "--bind-to")


def test_daemons_that_open_mpi_starts_by_srun_have_the_environment_though_sbatch_withholds_it():
    request = local(hosts=(), spans_hosts=True, environ={"SLURM_EXPORT_ENV": "NONE"})
    line = build(request, OPEN_MPI_5)
    assert line.added_environ == {"SLURM_EXPORT_ENV": "ALL"} and "SLURM_EXPORT_ENV" not in line.argv
    assert build(local(hosts=(), spans_hosts=True), OPEN_MPI_5).added_environ == {}


def test_more_ranks_than_cores_share_this_machine():
    assert "--oversubscribe" in build(local(num_cores=1), OPEN_MPI_5).argv
    assert build(local(num_cores=1), MPICH).argv[1:5] == ("-n", "2", "-hosts", "localhost:2")


def test_root_is_allowed_to_start_open_mpi():
    assert build(local(is_root=True), OPEN_MPI_5).added_environ == {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }


def test_tcp_only_leaves_no_other_way():
    assert "--mca btl tcp,self " in str(build(local(tcp_only=True), OPEN_MPI_5))
    assert "--mca btl_tcp_if_include lo " in str(build(local(tcp_only=True), OPEN_MPI_5))
    tcp = {"FI_PROVIDER": "tcp", **ON_ONE_HOST}
    assert build(local(tcp_only=True), MPICH).added_environ == {**tcp, **WITHOUT_POSIX}
    assert build(remote(tcp_only=True), MPICH).added_environ["UCX_TLS"] == "tcp,self"
    assert build(local(tcp_only=True), INTEL_MPI).added_environ == {**tcp, "I_MPI_FABRICS": "ofi", "I_MPI_PIN": "0"}


@pytest.mark.parametrize("launcher", [OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL_MPI])
def test_the_launcher_of_one_host_keeps_to_loopback_and_that_of_several_does_not(launcher):
    loopback = {"LD_PRELOAD": "/x/loopback.so", "_OCOMM_LOOPBACK": "prterun:prte"}
    assert build(local(loopback=loopback), launcher).added_environ.items() >= loopback.items()
    assert not build(remote(loopback=loopback), launcher).added_environ.keys() & loopback.keys()


@pytest.mark.parametrize("launcher", [OPEN_MPI_4, OPEN_MPI_5, MPICH])
def test_interfaces_mean_nothing_on_one_host(launcher):
    line = build(local(interfaces=("eth1",)), launcher)
    assert "eth1" not in line.argv
    assert line.added_environ["NCCL_SOCKET_IFNAME"] == "eth1"


def test_a_network_in_place_of_a_name_is_for_open_mpi_and_not_for_nccl():
    line = build(remote(interfaces=("10.0.0.0/24",)), OPEN_MPI_5)
    assert "--mca btl_tcp_if_include 10.0.0.0/24 --prtemca prte_if_include 10.0.0.0/24" in str(line)
    assert "NCCL_SOCKET_IFNAME" not in line.added_environ


def test_what_the_user_sets_for_mpich_is_not_set_again():
    line = build(local(environ={"UCX_NET_DEVICES": "mlx5_0:1"}), MPICH)
    assert line.added_environ == {"FI_TCP_IFACE": "lo", **WITHOUT_POSIX}
    assert "UCX_TLS" not in build(local(environ={"UCX_TLS": "all"}), MPICH).added_environ


def test_what_the_user_sets_is_not_set_again():
    argv = build(local(mpi_args=words("--mca pml ucx --map-by node")), OPEN_MPI_5).argv
    assert argv == words(
        f"/x/mpirun -np 2 -H localhost:2 --bind-to none --stdin none --output tag {TUNING} "
        "--mca pml ucx --map-by node python train.py"
    )
    argv = build(local(environ={"OMPI_MCA_btl_tcp_links": "4"}), OPEN_MPI_5).argv
    assert "btl_tcp_links" not in argv


def test_binding_args_take_the_place_of_the_binding():
    argv = build(local(binding_args=words("--bind-to core --map-by socket")), OPEN_MPI_5).argv
    assert argv[5:9] == words("--bind-to core --map-by socket")
    assert "none" not in argv[:9]


def test_horovods_words_for_binding_are_written_as_open_mpi_5_knows_them():
    given = words("-bind-to none -map-by slot -mca pml ob1 -x A")
    for request in (local(mpi_args=given), local(binding_args=given)):
        argv = build(request, OPEN_MPI_5).argv
        assert [word for word in argv if "bind" in word or "map" in word] == ["--bind-to", "--map-by"]
        assert "-x" in argv
        assert "-bind-to" in build(request, OPEN_MPI_4).argv
    # What the program is given stays as it is.
    command = ("python", "train.py", "-map-by", "colour")
    assert build(local(command=command), OPEN_MPI_5).argv[-4:] == command


@pytest.mark.parametrize("given", ["--map-by socket:PE=3", "--map-by ppr:2:node:pe=1:overload", "-cpus-per-proc 2"])
def test_ranks_that_get_several_cores_are_bound_to_them(given):
    for launcher in (OPEN_MPI_4, OPEN_MPI_5):
        assert "--bind-to" not in build(local(mpi_args=words(given)), launcher).argv


def test_from_64_hosts_on_ssh_goes_straight_to_each():
    hosts = parse_hosts(",".join(f"h{i}:1" for i in range(64)))
    line = str(build(local(num_proc=64, hosts=hosts, spans_hosts=True), OPEN_MPI_5))
    assert "--prtemca plm_ssh_no_tree_spawn 1 --prtemca plm_ssh_num_concurrent 64" in line


@pytest.mark.parametrize("launcher", [OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL_MPI, SRUN], ids=str)
def test_the_folder_for_output_on_this_machine_is_made_first(launcher: Launcher):
    assert build(local(output_directory="/out"), launcher).make_directory == "/out"


def test_the_printed_line_can_be_pasted():
    line = CommandLine(("/x/mpirun", "my script.py"), {"A": "b c"})
    assert str(line) == "A='b c' /x/mpirun 'my script.py'"


def test_every_variable_travels_but_those_of_this_host_or_process():
    travel = {"PATH", "HOME", "OCOMM_CYCLE_TIME", "HOROVOD_CYCLE_TIME", "PYTHONPATH", "LD_LIBRARY_PATH", "OMPI_MCA_pml"}
    stay = {
        "BASH_FUNC_x%%",
        "OLDPWD",
        "CUDA_VISIBLE_DEVICES",
        "NV_CUDA_VISIBLE_DEVICES",
        "HOSTNAME",
        "PWD",
        "SHLVL",
        "_",
    }
    stay |= {"SSH_CONNECTION", "SLURM_PROCID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "not a name"}
    assert exported_names(dict.fromkeys(travel | stay, "1")) == tuple(sorted(travel))


@pytest.mark.parametrize("launcher", [OPEN_MPI_5, MPICH, SRUN], ids=str)
@pytest.mark.parametrize("more", [(), (":",)], ids=["", "hidden"])
def test_ranks_have_variables_whose_names_no_shell_can_hold(launcher: Launcher, more: tuple[str, ...]):
    odd = {"FOO.BAR": """a 'b' "$c" `d`""", "it's $odd": "1", "BASH_FUNC_x%%": "() { :; }"}
    environ = {"PATH": os.environ["PATH"], **odd}
    program = (sys.executable, "-Sc", "import os; print(dict(os.environ))", *more)
    for request in (local, remote) if launcher is OPEN_MPI_5 else (local,):
        line = build(request(command=program, environ=environ, torch_environ={"WORLD_SIZE": "2"}), launcher)
        added = line.added_environ
        if request is remote:
            travels = {after for flag, after in itertools.pairwise(line.argv) if flag == "-x"}
            environ, added = {"PATH": environ["PATH"]}, {name: added[name] for name in added if name in travels}
            del odd["BASH_FUNC_x%%"]
        shell = line.argv[line.argv.index("sh") :]
        printed = subprocess.run(shell, env={**environ, **added}, check=True, capture_output=True, text=True).stdout
        found = ast.literal_eval(printed)
        assert {name: found.get(name) for name in odd} == odd
        assert not any(name.startswith("_OCOMM") for name in found) and found["WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    ("request_", "launcher", "message"),
    [
        (
            local(command=()),
            OPEN_MPI_5,
            "no program to start; write it after the flags, as in ocommrun -np 2 python train.py.",
        ),
        (
            remote(num_proc=5),
            OPEN_MPI_5,
            "-np asks for 5 ranks, but the hosts take 4: localhost:2,b:2. "
            "Raise the numbers behind the colons or lower -np.",
        ),
        (
            local(num_proc=4),
            MPICH,
            "-np asks for 4 ranks, but the hosts take 2: localhost:2. Raise the numbers behind the colons or lower "
            "-np.",
        ),
        (
            local(prefix_timestamp=True),
            MPICH,
            "-prefix-timestamp: MPICH 5.0.2 cannot print the time together with the rank; leave the flag out, "
            "or use Open MPI.",
        ),
        (
            local(interfaces=("eth0", "eth1")),
            MPICH,
            "--network-interfaces eth0,eth1: MPICH 5.0.2 takes one interface; name one.",
        ),
        (
            local(num_proc=3, hosts=parse_hosts("a:2,b:2"), spans_hosts=True),
            SRUN,
            "-H a:2,b:2: srun puts the same number of ranks on each host; give each the same number, or leave -H out "
            "and let the allocation decide.",
        ),
        (
            local(output_directory="/runs/12:30,a"),
            OPEN_MPI_5,
            "--output-filename /runs/12:30,a: Open MPI 5 takes ',' and ':' for the end of a name; choose another "
            "folder.",
        ),
        *(
            (
                local(mpi_args=words(f"-genv A 1 {option}")),
                MPICH,
                f"--mpi-args: {option.split()[0]} is an option of Open MPI's launcher, and MPICH 5.0.2 starts this job."
                " Leave it out: ranks may be more than cores, and have ocommrun's environment, on other hosts too.",
            )
            for option in ("--oversubscribe", "-x PATH", "-mca pml ob1")
        ),
        (
            local(ssh_port=22),
            SRUN,
            "--ssh-port and --ssh-identity-file: srun starts ranks without ssh; leave them out.",
        ),
    ],
)
def test_what_a_launcher_cannot_do_is_refused_with_the_reason(request_, launcher, message):
    with pytest.raises(LaunchError) as caught:
        build(request_, launcher)
    assert str(caught.value) == message


@pytest.mark.parametrize("launcher", [OPEN_MPI_5, MPICH, SRUN], ids=str)
def test_ranks_become_the_program_after_a_shell_that_tells_them_their_place(launcher: Launcher):
    line = build(local(torch_environ={"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4711"}), launcher)
    assert line.argv[-5:-3] == ("sh", "-c") and line.argv[-2:] == ("python", "train.py")
    variable = {OPEN_MPI_5: "OMPI_COMM_WORLD_RANK", MPICH: "PMI_RANK", SRUN: "SLURM_PROCID"}[launcher]
    end = 'exec "$0" "$@"' + (" </dev/null" if launcher is MPICH else "")
    assert line.argv[-3] == f"{exports(variable)}; {end}"
    assert line.added_environ["MASTER_PORT"] == "4711"


def test_what_all_ranks_share_of_torchs_variables_travels_to_other_hosts():
    line = build(remote(torch_environ={"MASTER_ADDR": "10.0.0.1"}), OPEN_MPI_5)
    assert ("-x", "MASTER_ADDR") in list(zip(line.argv, line.argv[1:], strict=False))


@pytest.mark.parametrize("launcher", [OPEN_MPI_4, OPEN_MPI_5, MPICH, INTEL_MPI, SRUN])
@pytest.mark.parametrize("word", [":", "--bind-to", "--bindto", "--map-by", "--rank-by", "--runtime-options"])
def test_a_launcher_does_not_see_what_it_would_take_for_its_own_in_the_programs_arguments(launcher, word):
    environ = {"SLURM_JOB_ID": "1"} if launcher is SRUN else {}
    program = ("python", "train.py", word, "two words", "$HOME")
    *flags, text = build(local(command=program, environ=environ), launcher).argv
    assert flags[-2:] == ["sh", "-c"] and program[2] not in flags[flags.index("sh") :]
    end = f"exec python train.py {word} 'two words' '$HOME'"
    assert text == end + (" </dev/null" if launcher in (MPICH, INTEL_MPI) else "")
