"""A Docker daemon of our own in a folder, with base images made of Debian's packages: no registry of images is asked.

Docker, Compose and buildx are those of Debian 13, unpacked; runc, iptables and debootstrap are this machine's.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tests.containers.sglang import pack

_SERVICES = "docker.io,docker-cli,docker-compose,docker-buildx,redis-server,prometheus"
_PYTHON = "ca-certificates,python3,python3-venv"
_NEEDED = ("apt-get", "debootstrap", "runc", "iptables-save", "iptables-restore", "tar")
_NEEDED_GB = 25
_CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"
_PATH = "ENV PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


def missing(folder: Path) -> str | None:
    """Why there can be no daemon on this machine, if so."""
    if platform.system() != "Linux" or os.geteuid() != 0:
        return "it needs Linux, as root"
    if lacking := [program for program in _NEEDED if shutil.which(program) is None]:
        return f"there is no {', '.join(lacking)}: apt-get install debootstrap iptables runc"
    if Path("/run/docker.sock").exists():
        return "another Docker daemon runs here, and their network rules would mix"
    if (free_gb := shutil.disk_usage(folder).free // 2**30) < _NEEDED_GB:
        return f"{folder} has {free_gb} GB free: it needs {_NEEDED_GB}; set TMPDIR to a folder with more"
    if not _mirror():
        return "apt knows no mirror of Debian"
    return None


class Engine:
    """The daemon, from its packages to its end. What it changes of this machine outside its folder it puts back."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._daemon: subprocess.Popen[bytes] | None = None
        self._rules = self._output("iptables-save")
        self._forwarding = _FORWARDING.read_text()

    @property
    def environment(self) -> Mapping[str, str]:
        """For `docker` and what calls it."""
        return {
            **os.environ,
            "PATH": f"{self._folder / 'bin'}:{os.environ['PATH']}",
            "DOCKER_CONFIG": str(self._folder / "client"),
            "DOCKER_HOST": f"unix://{self._folder / 'docker.sock'}",
        }

    def unpack(self) -> None:
        """Debian 13 for the services' images and Docker itself, Debian 12 for Python 3.11."""
        roots = {"services": ("trixie", _SERVICES), "python": ("bookworm", _PYTHON)}
        running = []
        for name, (release, packages) in roots.items():
            words = ["debootstrap", "--variant=minbase", f"--include={packages}", release, name, _mirror()]
            with (self._folder / f"{name}.log").open("wb") as log:
                running.append(subprocess.Popen(words, cwd=self._folder, stdout=log, stderr=log))
        for process, name in zip(running, roots, strict=True):
            if process.wait() != 0:
                raise RuntimeError(f"debootstrap: {(self._folder / f'{name}.log').read_text()[-2000:]}")

    def start(self) -> None:
        services, bin_folder = self._folder / "services", self._folder / "bin"
        bin_folder.mkdir()
        for program in ("sbin/dockerd", "sbin/docker-proxy", "bin/docker", "bin/containerd"):
            shutil.move(services / "usr" / program, bin_folder)
        shutil.move(services / "usr/bin/containerd-shim-runc-v2", bin_folder)
        shutil.move(services / "usr/bin/tini-static", bin_folder / "docker-init")
        shutil.move(services / "usr/libexec/docker/cli-plugins", self._folder / "client/cli-plugins")
        words = ["dockerd", "--bridge", "none", "--host", self.environment["DOCKER_HOST"]]
        for option, name in (("data-root", "data"), ("exec-root", "run"), ("pidfile", "dockerd.pid")):
            words += [f"--{option}", str(self._folder / name)]
        with (self._folder / "dockerd.log").open("wb") as log:
            self._daemon = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "info"], env=self.environment, capture_output=True, check=False).returncode:
            if time.monotonic() > deadline or self._daemon.poll() is not None:
                raise RuntimeError(f"dockerd: {(self._folder / 'dockerd.log').read_text()[-2000:]}")
            time.sleep(0.2)

    def make_images(self, python: str, redis: str, prometheus: str) -> None:
        """Under the names that the project's files give them."""
        # As pip and apt are set up here, they have to be in the image.
        shutil.copy(Path("/") / _CERTIFICATES, self._folder / "python" / _CERTIFICATES)
        self._chroot("python", "python3", "-m", "venv", "/usr/local")
        self._chroot("services", "install", "-d", "-o", "redis", "-g", "redis", "/data")
        self._chroot("services", "install", "-d", "-o", "nobody", "-g", "nogroup", "/prometheus")
        self._import("python", python, _PATH, f"ENV PIP_CERT=/{_CERTIFICATES}", "ENV PIP_DEFAULT_TIMEOUT=180")
        self._import("services", redis, _PATH)
        self._import("services", prometheus, _PATH, 'ENTRYPOINT ["prometheus"]')

    def make_sglang_image(self, sglang: str) -> None:
        """Under the name that deploy/sglang.Dockerfile gives it; `make_images` has been called."""
        words = ["docker", "import", "--change", _PATH, "--change", f"ENV PIP_CERT=/{_CERTIFICATES}", "-", sglang]
        with subprocess.Popen(words, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as taking:
            assert taking.stdin is not None
            pack(self._folder / "python", taking.stdin)
        if taking.returncode:
            raise RuntimeError(f"docker import {sglang} ended with {taking.returncode}")

    def close(self) -> None:
        """Ends the daemon, whatever runs in it, and lets go of the folder."""
        if self._daemon is not None:
            with suppress(subprocess.SubprocessError):
                left = self._output("docker", "ps", "--quiet", "--all").split()
                subprocess.run(
                    ["docker", "rm", "--force", *left], env=self.environment, capture_output=True, check=False
                )
                subprocess.run(
                    ["docker", "network", "prune", "--force"], env=self.environment, capture_output=True, check=False
                )
            self._daemon.send_signal(signal.SIGTERM)
            self._daemon.wait(60)
        self._put_back_rules()
        _FORWARDING.write_text(self._forwarding)
        # Nothing may be mounted in a folder that is about to be removed.
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in sorted((each for each in mounted if each.startswith(f"{self._folder}/")), reverse=True):
            subprocess.run(["umount", place], check=True)

    def _put_back_rules(self) -> None:
        """The tables as they were; those that there were none of are emptied."""
        rules = self._rules
        for table in self._output("iptables-save").split("*")[1:]:
            name, *lines = table.splitlines()
            if f"*{name}\n" not in rules:
                chains = [line.split() for line in lines if line.startswith(":")]
                built_in = "".join(f"{chain} ACCEPT [0:0]\n" for chain, policy, _ in chains if policy != "-")
                rules += f"*{name}\n{built_in}COMMIT\n"
        subprocess.run(["iptables-restore"], input=rules, text=True, check=True)

    def _import(self, root: str, image: str, *changes: str) -> None:
        tar = ["tar", "-C", str(self._folder / root), "--exclude=./proc/*", "--exclude=./sys/*", "-c", "."]
        options = [word for change in changes for word in ("--change", change)]
        with subprocess.Popen(tar, stdout=subprocess.PIPE) as packed:
            subprocess.run(
                ["docker", "import", *options, "-", image],
                env=self.environment,
                stdin=packed.stdout,
                stdout=subprocess.DEVNULL,
                check=True,
            )

    def _chroot(self, root: str, *words: str) -> None:
        subprocess.run(["chroot", str(self._folder / root), *words], check=True, stdout=subprocess.DEVNULL)

    def _output(self, *words: str) -> str:
        return subprocess.run(words, env=self.environment, capture_output=True, text=True, check=True).stdout


def _mirror() -> str:
    """The address of Debian's archive in apt's own sources, or ''."""
    lines = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(CODENAME)"], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    found = [line.split()[0] for line in lines if line.split()[1:] in (["bookworm"], ["trixie"])]
    return found[0] if found else ""
