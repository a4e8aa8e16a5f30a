"""A real Slurm of two virtual nodes on this machine, with GPUs that exist in its books only.

Needs Debian's packages slurm-wlm and munge. All daemons are this process's own, on ports found free and with files in a
temporary folder: neither a Slurm that the machine has nor one that a crashed run left behind is touched or in the way.
"""

import getpass
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "salloc", "scontrol", "sinfo", "scancel")
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # Debian keeps the daemons there

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")  # states of a job

# config_overrides: the nodes may promise more processors than this machine has.
CONFIGURATION = """
ClusterName=test
FirstJobId={first_job}
SlurmctldHost={host}({address})
SlurmctldPort={ports[0]}
FirstJobId={first_job}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
KillWait=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=2
{gres_types}
NodeName=n1 NodeHostname={host} NodeAddr={address} Port={ports[1]} CPUs=16 RealMemory=1000 {gres} State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr={address} Port={ports[2]} CPUs=16 RealMemory=1000 {gres} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP GraceTime=60
PartitionName=urgent Nodes=n1,n2 MaxTime=INFINITE State=UP PriorityTier=10
"""

GPUS = "".join(
    f"NodeName={node} Name=gpu File={file}\n" for node in ("n1", "n2") for file in ("/dev/null", "/dev/zero")
)


def missing():
    """The programs that are not installed."""
    return [name for name in PROGRAMS if not shutil.which(name, path=SYSTEM_PATH)]


def free_ports(count):
    """Ports below those that outgoing connections get, so that they stay free until the daemons take them."""
    ports = []
    for port in range(27000 + os.getpid() * 7 % 4000, 32000):  # not where a cluster of another process looks too
        with socket.socket() as server:
            try:
                server.bind(("", port))
            except OSError:
                continue
            ports.append(port)
            if len(ports) == count:
                return ports
    raise RuntimeError("no free ports from 27000 to 32000")


class Job:
    """A submitted job: its number, its output file, and what scontrol says of it."""

    def __init__(self, cluster, number, output):
        self.cluster, self.number, self.output = cluster, number, output

    def show(self):
        """The fields of `scontrol show job`."""
        text = self.cluster.call("scontrol", "show", "job", str(self.number))
        return dict(re.findall(r"(\S+?)=(\S*)", text))

    def log(self):
        return self.output.read_text() if self.output.exists() else ""

    def wait(self, *states, seconds=120):
        """Wait until the job has ended, or is in one of the states; returns its state."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            state = self.show()["JobState"]
            if state in (states or ENDED):
                return state
            time.sleep(0.2)
        raise AssertionError(f"job {self.number} is {state} after {seconds} s; its log:\n{self.log()}")

    def wait_for(self, text, seconds=180):
        """Wait until its log has a match of the pattern `text`; the job may not end before. Returns the match."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            runs = self.show()["JobState"] not in ENDED  # asked first: what it wrote before its end is read
            found = re.search(text, self.log())
            if found:
                return found
            assert runs, f"the job ended; its log:\n{self.log()}"
            time.sleep(0.2)
        raise AssertionError(f"no {text!r} after {seconds} s; the log of job {self.number}:\n{self.log()}")


class Cluster:
    """The running cluster; `environment` is what its commands need."""

    def __init__(self, folder, gpus):
        self.folder = folder
        self.gpus = gpus
        self.daemons = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM_")},
            "PATH": SYSTEM_PATH,
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def call(self, *command, **options):
        """Run a command against this cluster; returns what it prints."""
        options = {"env": self.environment, "capture_output": True, "text": True, "timeout": 60} | options
        done = subprocess.run(command, **options)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *command, cwd, environment=None):
        """sbatch with these options, script and arguments, in the folder `cwd`; returns the Job."""
        output = self.folder / "output"
        number = self.call(
            "sbatch", "--parsable", f"--output={output}/%j.txt", *command,
            cwd=cwd, env=self.environment | (environment or {}),
        )  # fmt: skip
        return Job(self, int(number), output / f"{int(number)}.txt")

    def start_daemon(self, *command):
        command = ["setpriv", "--pdeathsig", "TERM", *command]  # if this process is killed, its daemons end with it
        with open(self.folder / "log" / f"{len(self.daemons)}-{command[3]}.txt", "wb") as log:
            self.daemons.append(
                subprocess.Popen(
                    command,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def logs(self):
        """The ends of the daemons' logs, for an error message."""
        parts = []
        for path in sorted((self.folder / "log").iterdir()):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}")
        return "\n".join(parts)

    def wait_until(self, what, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [daemon.args[3] for daemon in self.daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise RuntimeError(f"Slurm: {what}: not after {seconds} s; ended: {ended}\n{self.logs()}")
            time.sleep(0.1)

    def states(self):
        done = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N=%t"],
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    def idle(self):
        return self.states() == ["n1=idle", "n2=idle"]

    def start(self):
        for name in ("state", "spool/n1", "spool/n2", "log", "output"):
            (self.folder / name).mkdir(parents=True)
        host = socket.gethostname().split(".")[0]
        (self.folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host,
                address="127.0.0.1",
                user=getpass.getuser(),
                folder=self.folder,
                ports=free_ports(3),
                gres_types="GresTypes=gpu" if self.gpus else "",
                gres="Gres=gpu:2" if self.gpus else "",
                first_job=1 + os.getpid() * 50 % 60000,  # a job's number decides its port
            )
        )
        (self.folder / "gres.conf").write_text(GPUS if self.gpus else "")
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        # --force: the folder is this user's alone, where munged expects one that all users may enter
        self.start_daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/log/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self.wait_until("munged listens", (self.folder / "munge.socket").exists)
        self.start_daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self.start_daemon("slurmd", "-D", "-N", node)
        self.wait_until("the nodes are idle", self.idle)

    def stop(self):
        """Cancel what runs, then end the daemons: the newest first, by their numbers."""
        subprocess.run(["scancel", "--user", getpass.getuser()], env=self.environment, timeout=30, check=False)
        deadline = time.monotonic() + 15
        while not self.idle() and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def hurry(job):
    """Let a job start that has gone back into the queue, where Slurm would leave it for two minutes.

    Not at once: the last start's credential is revoked for the second that it ended in.
    """
    time.sleep(2.5)
    command = ["scontrol", "update", f"JobId={job.number}", "StartTime=now"]
    subprocess.run(command, env=job.cluster.environment, capture_output=True)  # refused if it runs by now


def require():
    """Skip a test where Slurm is not installed; in CI fail it."""
    absent = missing()
    if absent:
        reason = f"Slurm is not installed ({', '.join(absent)}): apt-get install slurm-wlm munge"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)


@contextmanager
def running_cluster(gpus=True):
    """A cluster with idle nodes of two GPUs each, or of none, for the length of a `with`."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: a socket's may have 107 characters
    cluster = Cluster(folder, gpus)
    try:
        cluster.start()
        yield cluster
    finally:
        if cluster.daemons:
            cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
