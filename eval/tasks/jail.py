# SPDX-License-Identifier: Apache-2.0
"""Start one program where it can do no harm; a script that ``sandbox.py`` runs.

Called as ``python -I -S jail.py LIMITS``, LIMITS a JSON object, with the program on standard
input. Two processes: the outer one makes namespaces (user, network, mount, process, IPC, host
name) and waits; the inner one is process 1 of the new process namespace, builds a root directory
of its own, gives up every right and becomes a bare Python. With process 1 everything inside dies,
and process 1 dies with the outer process.

Whatever cannot be set up is written to the status pipe and ends the process before the program is
read: there is no weaker jail to fall back to.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
from typing import Any, NamedTuple, NoReturn

NOBODY = 65534
_NEWNS, _NEWUTS, _NEWIPC = 0x00020000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE = 2, 4, 4096, 16384, 1 << 18
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _ATTR_NOEXEC = 1, 2, 4, 8
_AT_FDCWD, _AT_RECURSIVE, _MNT_DETACH = -100, 0x8000, 2
_SYS_MOUNT_SETATTR = 442
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_SECCOMP_ALLOW, _SECCOMP_KILL, _SECCOMP_EPERM = 0x7FFF0000, 0x80000000, 0x00050001
_libc = ctypes.CDLL(None, use_errno=True)


class _Machine(NamedTuple):
    """Numbers of the kernel's interface on one kind of processor."""

    audit: int
    pivot_root: int
    denied: tuple[int, ...]


# Denied: socket (vsock and the like are in no network namespace), ptrace, unshare, setns, add_key,
# request_key, keyctl, perf_event_open, bpf, userfaultfd, io_uring_setup; and every way to send a
# signal, as process 1 would not notice those that it sends to its group: kill, tkill, tgkill,
# rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal.
_MACHINES = {
    "x86_64": _Machine(
        audit=0xC000003E,
        pivot_root=155,
        denied=(
            *(41, 101, 272, 308, 248, 249, 250, 298, 321, 323, 425),
            *(62, 200, 234, 129, 297, 424),
        ),
    ),
    "aarch64": _Machine(
        audit=0xC00000B7,
        pivot_root=41,
        denied=(
            *(198, 117, 97, 268, 217, 218, 219, 241, 280, 282, 425),
            *(129, 130, 131, 138, 240, 424),
        ),
    ),
}

# What runs inside. The names it needs are taken before the program can replace them.
_RUNNER = """
import json, os, sys, types
job = json.loads(sys.stdin.buffer.read())
os.write(STATUS, b"ready")
os.close(STATUS)
write, leave, name = os.write, os._exit, "solution"
module = types.ModuleType(name)
sys.modules[name] = module
word = "passed"
try:
    exec(compile(job.pop("program"), name + ".py", "exec"), module.__dict__)
except BaseException as error:
    word = "failed " + type(error).__name__
    try:
        word += ": " + str(error)[:200]
    except BaseException:
        pass
try:
    sys.stdout.flush()
finally:
    write(1, ("\\n" + job["token"] + " " + word).encode("utf-8", "replace"))
    leave(0)
"""


def main() -> None:
    """Run the jail; exits with the program's status."""
    limits = json.loads(sys.argv[1])
    status = limits["status"]
    try:
        machine = _MACHINES.get(platform.machine())
        if machine is None:
            raise OSError(f"no system call filter for {platform.machine()!r} processors")
        rooted = os.geteuid() == 0
        _user_namespace(rooted)
        _call("unshare", _libc.unshare, _NEWNS | _NEWNET | _NEWPID | _NEWIPC | _NEWUTS)
        alive, held = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(held)
            _enter(limits, machine, rooted, alive)
    except OSError as error:
        _refuse(status, error)
    os.close(status)
    _, result = os.waitpid(child, 0)
    sys.exit(1 if result else 0)


def _enter(limits: dict[str, Any], machine: _Machine, rooted: bool, alive: int) -> NoReturn:
    """Process 1: shut the doors one by one, then become the program."""
    try:
        os.setsid()
        os.umask(0o022)
        python = os.path.realpath(sys.executable)
        _root_directory(limits["root"], limits["disk_bytes"], machine)
        if rooted:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        # After the change of user, which resets it.
        _call("prctl", _libc.prctl, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if select.select([alive], [], [], 0)[0]:
            os._exit(1)  # the outer process died before it could be followed
        for name in ("CORE", "CPU", "FSIZE", "NPROC", "NOFILE", "AS"):
            value = limits["resources"][name]
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        _call("prctl", _libc.prctl, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _filter_calls(machine)
        os.set_inheritable(limits["status"], True)
        runner = f"STATUS = {limits['status']}\n{_RUNNER}"
        os.execve(python, [python, "-I", "-S", "-B", "-c", runner], {"PYTHONUTF8": "1"})
    except OSError as error:
        _refuse(limits["status"], error)


def _user_namespace(rooted: bool) -> None:
    """Enter a user namespace in which the program's user is nobody.

    As root, nobody outside is nobody inside, so that the program owns nothing anywhere; mapping
    somebody else takes a process that stayed outside. Otherwise nobody inside is who called.
    """
    user, group, pid = os.geteuid(), os.getegid(), os.getpid()
    made, go = os.pipe()
    helper = os.fork() if rooted else -1
    if helper == 0:
        code = 1
        os.close(go)
        if os.read(made, 1):
            with contextlib.suppress(OSError):
                for name in ("uid_map", "gid_map"):
                    _write(f"/proc/{pid}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
                code = 0
        os._exit(code)
    os.close(made)
    try:
        _call("unshare (user namespace)", _libc.unshare, _NEWUSER)
        if rooted:
            os.write(go, b"x")
    finally:
        os.close(go)
        failed = rooted and os.waitpid(helper, 0)[1] != 0
    if failed:
        raise OSError("users cannot be mapped into a user namespace")
    if not rooted:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {user} 1\n")
        _write("/proc/self/gid_map", f"{NOBODY} {group} 1\n")
    # Containers may show /proc/sys read-only; this lock is one of several.
    with contextlib.suppress(OSError):
        _write("/proc/sys/user/max_user_namespaces", "0")


def _root_directory(root: str, disk_bytes: int, machine: _Machine) -> None:
    """Replace the whole file system: Python and its libraries, read-only, and an empty ``/box``.

    Args:
        root: an existing empty directory to mount it on; nothing is written below it outside.
    """
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,nr_inodes=512,mode=755")
    for path in _visible():
        _show(path, root + path, _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV)
    for path in ("/lib", "/lib64", "/bin"):
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)
    _show("/dev/null", root + "/dev/null", _ATTR_NOSUID | _ATTR_NOEXEC)
    os.mkdir(root + "/box")
    options = f"size={disk_bytes},nr_inodes=256,mode=700,uid={NOBODY},gid={NOBODY}"
    _mount("tmpfs", root + "/box", "tmpfs", _NOSUID | _NODEV, options)
    os.chdir(root)
    _call("pivot_root", _libc.syscall, machine.pivot_root, b".", b".")
    _call("umount2", _libc.umount2, b".", _MNT_DETACH)
    _attributes("/", _ATTR_RDONLY | _ATTR_NOSUID | _ATTR_NODEV, 0)
    os.chdir("/box")


def _visible() -> list[str]:
    """What Python needs: none twice, none below another."""
    wanted = [
        "/usr",
        os.path.realpath(sys.base_prefix),
        os.path.realpath(sys.base_exec_prefix),
        os.path.realpath(sys.executable),
        *(p for p in ("/lib", "/lib64") if not os.path.islink(p)),
        "/etc/ld.so.cache",
    ]
    found: list[str] = []
    for path in sorted(set(wanted)):
        below = any(path.startswith(other.rstrip("/") + "/") for other in found)
        if os.path.exists(path) and not below:
            found.append(path)
    if "/" in found:
        raise OSError("Python is installed in '/': nothing could be hidden from the program")
    return found


def _show(path: str, target: str, attributes: int) -> None:
    """Make ``path`` visible at ``target``, whatever is mounted below it included."""
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    _mount(path, target, None, _BIND | _REC)
    _attributes(target, attributes, _AT_RECURSIVE)


def _filter_calls(machine: _Machine) -> None:
    """Refuse the calls of ``denied`` with EPERM; end a process that uses another interface."""
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    denied = machine.denied
    lines = [
        (load, 0, 0, 4),
        (equal, 1, 0, machine.audit),
        (give, 0, 0, _SECCOMP_KILL),
        (load, 0, 0, 0),
        # x32, the second interface of x86-64.
        (at_least, len(denied) + 1, 0, 0x40000000),
        *((equal, len(denied) - i, 0, number) for i, number in enumerate(denied)),
        (give, 0, 0, _SECCOMP_ALLOW),
        (give, 0, 0, _SECCOMP_EPERM),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    program = ctypes.create_string_buffer(struct.pack("HP", len(lines), ctypes.addressof(code)))
    _call("seccomp", _libc.prctl, _PR_SET_SECCOMP, 2, program, 0, 0)


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call(f"mount {target}", _libc.mount, *encoded, ctypes.c_ulong(flags), os.fsencode(options))


def _attributes(target: str, add: int, flags: int) -> None:
    values = struct.pack("QQQQ", add, 0, 0, 0)
    _call(
        f"mount_setattr {target}",
        _libc.syscall,
        _SYS_MOUNT_SETATTR,
        _AT_FDCWD,
        os.fsencode(target),
        flags,
        values,
        ctypes.c_size_t(len(values)),
    )


def _call(what: str, function: Any, *args: Any) -> None:
    if function(*args) != 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


def _refuse(status: int, error: OSError) -> NoReturn:
    os.write(status, str(error).encode("utf-8", "replace")[:500])
    os._exit(1)


if __name__ == "__main__":
    main()
