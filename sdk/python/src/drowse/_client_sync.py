# Made from _client_async.py by generate.py.
"""The client. _client_sync.py is made from _client_sync.py: see generate.py."""

from __future__ import annotations

import base64
import json
import math
import os
import secrets as random
import ssl
import tarfile
import tempfile
from collections.abc import Iterator, Callable
from typing import Any, List, TypeVar, cast
from urllib.parse import quote, urlencode

from . import types
from ._sio import in_thread, sleep
from ._http_sync import HTTP, Response
from ._process_sync import Port, Process
from ._results import Completed, Lineage, Versioned, exit_of
from ._tar import tar_of
from .errors import CommandFailed, NotFound, ProtocolError, field, items, object_of

T = TypeVar("T")
NEW: Any = object()
METADATA = ("class", "owner", "purpose", "tags", "expires", "keep", "persist", "rotate", "wake", "gateway")


def segment(text: str) -> str:
    return quote(text, safe="")


def query(**values: Any) -> str:
    pairs = []
    for name, value in values.items():
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is not None and one is not False and one != "":
                pairs.append((name, "1" if one is True else str(one)))
    return "?" + urlencode(pairs) if pairs else ""


def key_of(key: Any) -> dict[str, str]:
    if key is None:
        return {}
    return {"Idempotency-Key": random.token_hex(16) if key is NEW else key}


def environment(env: dict[str, str] | None) -> List[str] | None:
    return [f"{k}={v}" for k, v in env.items()] if env else None


def body_of(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode()
    return bytes(data) if isinstance(data, (bytearray, memoryview)) else data


class Drowse:
    """A client of one server. It may be shared by tasks, and by threads in its synchronous form.

    `url` is http://, https:// or unix:///path/of/api.sock, by default DROWSE_URL; `token` is by default DROWSE_TOKEN.
    `timeout` in seconds bounds each call until its answer begins; calls have a `timeout` of their own. `retries` are
    further tries of what may be repeated: reads, and creations, whose idempotency key makes that one of them counts.
    `gateway` is the domain of the server's gateway, for `Sandbox.url`.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, timeout: float | None = 600.0, retries: int = 2,
        tls: ssl.SSLContext | None = None, gateway: str | None = None,
    ) -> None:
        url = url or os.environ.get("DROWSE_URL", "")
        if not url:
            raise ValueError("there is no url: give one, or set DROWSE_URL")
        token = os.environ.get("DROWSE_TOKEN", "") if token is None else token
        self.gateway = gateway or os.environ.get("DROWSE_GATEWAY", "")
        self.http = HTTP(url, token, timeout, retries, tls)
        self.snapshots = Snapshots(self)
        self.images = Images(self)
        self.volumes = Volumes(self)
        self.operations = Operations(self)
        self.templates = Templates(self)

    def __enter__(self) -> Drowse:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.http.close()

    def call(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, timeout: float | None = None,
        etag: bool = False,
    ) -> Any:
        """Send a request with JSON, and return the JSON of its answer: for requests that have no method here."""
        h = dict(headers or {})
        data = None
        if body is not None:
            h["Content-Type"], data = "application/json", json.dumps(body).encode()
        retry = method in ("GET", "PUT", "DELETE") or "Idempotency-Key" in h
        answer = self.http.request(method, path, headers=h, body=data, timeout=timeout, retry=retry)
        text = answer.document()
        doc = object_of(text) if text else {}
        return Versioned(doc, answer.headers.get("etag", "")) if etag else doc

    def version(self) -> types.Is:
        return cast(types.Is, self.call("GET", "/v1/version"))

    def health(self) -> types.Health:
        """Say what the server's checks found; one that fails raises ServerError."""
        return cast(types.Health, self.call("GET", "/healthz"))

    def ready(self) -> types.Health:
        """Say whether sandboxes can be woken on the host; if not, it raises ServerError."""
        return cast(types.Health, self.call("GET", "/readyz"))

    def host(self) -> types.Host:
        """Say what the host has for its sandboxes, and how many there are by status."""
        return cast(types.Host, self.call("GET", "/v1/host"))

    def secret_sources(self) -> List[types.SecretSourcesSourcesItem]:
        """List where secrets may come from: the argument source of `Sandbox.secrets.set`."""
        return items(self.call("GET", "/v1/secret-sources"), "sources")

    def prune(self, *, dry_run: bool = False) -> types.Pruned:
        """Do what metadata say is to be done by now, or with dry_run say what that would be."""
        return cast(types.Pruned, self.call("POST", "/v1/prune", {"dry_run": dry_run}))

    def create(
        self, image: str = "", *, name: str = "", policy: types.Policy | None = None, get_or_create: bool = False,
        idempotency_key: str | None = NEW, timeout: float | None = None, **more: Any,
    ) -> Sandbox:
        """Make a sandbox and boot it.

        Further arguments are fields of the API: those of the spec, such as memory_mib, vcpus, network, idle and
        volumes; those of the metadata, such as class_, tags, owner and expires; and disk. A template that fits is used,
        unless boot is true.
        """
        spec: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        doc: dict[str, Any] = {"spec": spec}
        if image:
            spec["image"] = image
        if name:
            spec["name"] = name
        if policy is not None:
            spec["policy"] = policy
            spec["network"] = "tap"
        for given, value in more.items():
            to = given.rstrip("_")
            (metadata if to in METADATA else doc if to in ("disk", "boot") else spec)[to] = value
        if metadata:
            doc["metadata"] = metadata
        if get_or_create:
            doc["get_or_create"] = True
        made = self.call("POST", "/v1/sandboxes", doc, headers=key_of(idempotency_key), timeout=timeout)
        return Sandbox(self, field(made, "name"), made)

    def sandbox(self, name: str) -> Sandbox:
        """Return a handle of a sandbox, without asking whether it exists."""
        return Sandbox(self, name)

    def get(self, name: str) -> Sandbox:
        """Return a handle of a sandbox that exists."""
        b = Sandbox(self, name)
        b.refresh()
        return b

    def list(
        self, *, owner: str = "", tag: Any = None, class_: str = "", status: Any = None, page: int = 100,
    ) -> Iterator[Sandbox]:
        """Yield sandboxes in the order of their names; tag and status may be lists."""
        after = ""
        while True:
            doc = self.call("GET", "/v1/sandboxes" + query(owner=owner, tag=tag, status=status, limit=page, after=after, **{"class": class_}))
            for one in items(doc, "sandboxes"):
                yield Sandbox(self, field(one, "name"), one)
            after = doc.get("next", "")
            if not after:
                return

    def events(
        self, *, since: int | str | None = None, follow: bool = True, type: Any = None, sandbox: str = "", owner: str = "",
        tag: str = "",
    ) -> Iterator[types.EventLine]:
        """Yield events; "now" or a cursor says from where. After a broken connection, go on with the last cursor."""
        path = "/v1/events" + query(since=since, follow=follow, type=type, sandbox=sandbox, owner=owner, tag=tag)
        return lines(self.http, path, retry=True)


def lines(http: HTTP, path: str, retry: bool = False) -> Iterator[Any]:
    answer = http.request("GET", path, timeout=math.inf, retry=retry)
    try:
        for line in answer.lines():
            yield line
    finally:
        answer.close()


def pieces(http: HTTP, path: str, *, follow: bool = False) -> Iterator[bytes]:
    answer = http.request("GET", path, timeout=math.inf if follow else None)
    try:
        while piece := answer.read():
            yield piece
    finally:
        answer.close()


class Sandbox:
    """A handle of a sandbox. What works inside it wakes it first."""

    def __init__(self, client: Drowse, name: str, info: types.Sandbox | None = None) -> None:
        self.client, self.name, self.info = client, name, info
        self._path = "/v1/sandboxes/" + segment(name)
        self.files = Files(self)
        self.processes = Processes(self)
        self.secrets = Secrets(self)
        self.services = Services(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    def _call(self, method: str, path: str = "", body: Any = None, **more: Any) -> Any:
        return self.client.call(method, self._path + path, body, **more)

    def refresh(self) -> types.Sandbox:
        """Read what is known of it, also into `info`. It does not wake it."""
        self.info = cast(types.Sandbox, self._call("GET"))
        return self.info

    def update(self, *, if_match: str | None = None, **changes: Any) -> types.Sandbox:
        """Change fields of the API's PATCH, such as tags, class_, idle, memory_mib; only if it still has the ETag if_match."""
        body = {k.rstrip("_"): v for k, v in changes.items()}
        self.info = cast(types.Sandbox, self._call("PATCH", "", body, headers={"If-Match": if_match} if if_match else None))
        return self.info

    def delete(self) -> types.Freed:
        """Remove it, running or not. Removing what is not there succeeds."""
        return cast(types.Freed, self._call("DELETE"))

    def sleep(self, *, hooks: str = "", durable: bool = False, timeout: float | None = None) -> types.SleepResult:
        """Put it to sleep; with durable, wait until the other hosts of its cluster can wake it."""
        body = {"hooks": hooks, "durable": durable}
        return cast(types.SleepResult, self._call("POST", "/sleep", body, timeout=timeout))

    def wake(self, *, timeout: float | None = None) -> types.Sandbox:
        self.info = cast(types.Sandbox, self._call("POST", "/wake", {}, timeout=timeout))
        return self.info

    def start(self, *, timeout: float | None = None) -> types.Sandbox:
        """Bring it up: wake it, or boot it if it has stopped."""
        self.info = cast(types.Sandbox, self._call("POST", "/start", {}, timeout=timeout))
        return self.info

    def stop(self, *, kill: bool = False, timeout_seconds: int = 30) -> types.Sandbox:
        """Shut it down. Its memory is lost, its disk stays."""
        self.info = cast(types.Sandbox, self._call("POST", "/stop", {"kill": kill, "timeout_seconds": timeout_seconds}))
        return self.info

    def migrate(self, to: str, *, hooks: str = "", timeout: float | None = None) -> types.MigrateResult:
        """Move it to another host of the server's cluster, awake if it is. For tokens with the scope admin."""
        return cast(types.MigrateResult, self._call("POST", "/migrate", {"to": to, "hooks": hooks}, timeout=timeout))

    def extend(self, until: str) -> types.Sandbox:
        """Let it expire later; until is a time of RFC 3339."""
        self.info = cast(types.Sandbox, self._call("POST", "/extend", {"until": until}))
        return self.info

    def rename(self, to: str) -> None:
        self.info = cast(types.Sandbox, self._call("POST", "/rename", {"to": to}))
        self.__init__(self.client, to, self.info)  # type: ignore[misc]

    def fork(
        self, n: int = 1, *, names: List[str] | None = None, tags: List[str] | None = None, idempotency_key: str | None = NEW,
        timeout: float | None = None,
    ) -> List[Sandbox]:
        """Make n children that go on from this moment, each with the processes and files of their parent."""
        children: List[dict[str, Any]] = [{"name": name} for name in names] if names else [{} for _ in range(n)]
        if tags:
            for c in children:
                c["tags"] = tags
        doc = self._call("POST", "/fork", {"children": children}, headers=key_of(idempotency_key), timeout=timeout)
        return [Sandbox(self.client, field(one, "name"), one) for one in items(doc, "sandboxes")]

    def snapshot(
        self, note: str = "", *, disk_only: bool = False, hooks: str = "", idempotency_key: str | None = NEW,
        timeout: float | None = None,
    ) -> types.SleepResult:
        """Write a snapshot: its id is "snapshot" of the result."""
        body: dict[str, Any] = {"note": note, "disk_only": disk_only, "hooks": hooks}
        return cast(types.SleepResult, self._call("POST", "/snapshot", body, headers=key_of(idempotency_key), timeout=timeout))

    def list_snapshots(self) -> List[types.SnapshotInfo]:
        return items(self._call("GET", "/snapshots"), "snapshots")

    def rewind(self, snapshot: str, *, timeout: float | None = None) -> types.Sandbox:
        """Go back to one of its snapshots."""
        self.info = cast(types.Sandbox, self._call("POST", "/restore", {"snapshot": snapshot}, timeout=timeout))
        return self.info

    def lineage(self) -> Lineage:
        """Say which of its relatives exist."""
        me = self.refresh()
        by_id: dict[str, types.Sandbox] = {}
        children = []
        for b in self.client.list():
            assert b.info is not None
            by_id[b.info["id"]] = b.info
            if b.info.get("parent_id") == me["id"]:
                children.append(b.name)
        ancestors: List[str] = []
        at = by_id.get(me.get("parent_id", ""))
        while at is not None and at["name"] not in ancestors:
            ancestors.append(at["name"])
            at = by_id.get(at.get("parent_id", ""))
        return Lineage(ancestors, children)

    def policy(self) -> Versioned[types.Policy]:
        """Return its network policy, with the ETag for set_policy."""
        return cast("Versioned[types.Policy]", self._call("GET", "/policy", etag=True))

    def set_policy(self, policy: types.Policy, *, if_match: str | None = None) -> types.PolicyResult:
        """Replace its network policy; only if the present one still has the ETag if_match, else PreconditionFailed."""
        return cast(types.PolicyResult, self._call("PUT", "/policy", policy, headers={"If-Match": if_match} if if_match else None))

    def promote(self, *, timeout: float | None = None) -> List[types.PromotedPromotedItem]:
        """Copy what is to be promoted to the host now."""
        return items(self._call("POST", "/promote", {}, timeout=timeout), "promoted")

    def stats(self) -> types.Stats:
        """Say what it uses. It must run."""
        return cast(types.Stats, self._call("GET", "/stats"))

    def history(self, *, limit: int | None = None, before: str = "") -> types.History:
        """Say what was run in it and when it slept, the newest first; before is a time of RFC 3339."""
        return cast(types.History, self._call("GET", "/history" + query(limit=limit, before=before)))

    def inspect(self) -> dict[str, Any]:
        """Return its whole record."""
        return cast("dict[str, Any]", self._call("GET", "/inspect"))

    def gateway(self) -> types.GatewayAccess:
        """Say whom the gateway lets in, and return the token; update(gateway=…, new_gateway_token=True) changes both."""
        return cast(types.GatewayAccess, self._call("GET", "/gateway"))

    def network(self) -> types.NetworkStats:
        """Say what its network has passed and denied. It must run."""
        return cast(types.NetworkStats, self._call("GET", "/network"))

    def _lines(self, path: str) -> Iterator[Any]:
        return lines(self.client.http, self._path + path)

    def network_events(self, *, follow: bool = False) -> Iterator[types.NetEventLine]:
        """Yield the last denied packets, and with follow those to come. It must run."""
        return self._lines("/network/events" + query(follow=follow))

    def flows(self) -> types.Flows:
        """Return its open flows, and the last that have ended or were denied. It must run."""
        return cast(types.Flows, self._call("GET", "/flows"))

    def follow_flows(self) -> Iterator[types.FlowRecordLine]:
        """Yield flows as they open, end or are denied. It must run."""
        return self._lines("/flows/follow")

    def audit(self, *, since: str = "", follow: bool = False, trailer: bool = False) -> Iterator[types.EntryLine]:
        """Yield what was done in it, the oldest first; since is a time of RFC 3339, and trailer adds a last line on the trail."""
        return self._lines("/audit" + query(since=since, follow=follow, trailer=trailer))

    def diff(self, *, limit: int | None = None) -> Iterator[types.DiffLine]:
        """Yield the paths that differ between its disk and its image; the last line has "end"."""
        return self._lines("/diff" + query(limit=limit))

    def console(self, *, tail: int | None = None, follow: bool = False) -> Iterator[bytes]:
        """Yield the last bytes of its console, and with follow those to come, until it stops."""
        path = self._path + "/console" + query(tail=tail, follow=follow)
        return pieces(self.client.http, path, follow=follow)

    def run(
        self, command: List[str] | str, *, stdin: bytes | str = b"", user: str = "", cwd: str = "", env: dict[str, str] | None = None,
        timeout_seconds: int = 60, check: bool = False, timeout: float | None = None,
    ) -> Completed:
        """Run a command to its end, a string by sh -c, and keep the first MiB of each stream.

        After timeout_seconds, at most 3600, it is killed. With check, another exit code than 0 raises CommandFailed.
        """
        body = {"command": argv(command), "user": user, "cwd": cwd, "env": environment(env), "timeout_seconds": timeout_seconds}
        if stdin:
            body["stdin"] = base64.b64encode(body_of(stdin)).decode()
        doc = self._call("POST", "/exec", body, timeout=timeout_seconds + 120 if timeout is None else timeout)
        end = exit_of(doc)
        try:
            stdout, stderr = (base64.b64decode(field(doc, name), validate=True) for name in ("stdout", "stderr"))
        except ValueError:
            raise ProtocolError("the answer's output is not base64") from None
        out = Completed(end, stdout, stderr, bool(doc.get("truncated")))
        if check and end.code != 0:
            raise CommandFailed(f"{command!r} ended with {end.code}: {end.not_started or out.stderr[-500:].decode(errors='replace')}", out)
        return out

    def exec(
        self, command: List[str] | str, *, stdin: bool = False, tty: tuple[int, int] | None = None, user: str = "", cwd: str = "",
        env: dict[str, str] | None = None, timeout_seconds: int = 0, detach: bool = False, process: str = "", output_kib: int = 0,
        hold_output: bool = False,
    ) -> Process:
        """Start a command, a string by sh -c, with streams.

        stdin says that it is written to. tty is the rows and columns of a terminal. A detached process outlives the
        stream; process is its name, and output_kib how much of its newest output is kept. With hold_output it waits
        instead of losing older output.
        """
        first: dict[str, Any] = {"command": argv(command), "user": user, "cwd": cwd, "env": environment(env), "stdin": stdin, "timeout_seconds": timeout_seconds}
        first["tty"] = terminal_of(tty)
        if detach:
            first |= {"detach": True, "process": process, "output_kib": output_kib, "hold_output": hold_output}
        p = Process(self.client.http.websocket(self._path + "/exec"))
        p._begin({k: v for k, v in first.items() if v})
        return p

    def terminal(self, command: List[str] | str = ("sh", "-l"), *, rows: int = 24, cols: int = 80, **more: Any) -> Process:  # type: ignore[assignment]
        """Start a command with a terminal, by default a shell."""
        return self.exec(command, tty=(rows, cols), **more)

    def url(self, port: int, scheme: str = "https") -> str:
        """Return the address of a port behind the server's gateway."""
        if not self.client.gateway:
            raise ValueError("the gateway's domain is not known: give `gateway`, or set DROWSE_GATEWAY")
        return f"{scheme}://{port}-{self.name}.{self.client.gateway}"

    def connect(self, port: int) -> Port:
        """Connect to a TCP port, through the API."""
        p = Port(self.client.http.websocket(f"{self._path}/ports/{int(port)}"))
        p._begin()
        return p


def argv(command: Any) -> List[str]:
    return ["sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]


def terminal_of(size: tuple[int, int] | None) -> dict[str, int] | None:
    return None if size is None else {"rows": size[0], "cols": size[1]}


class Processes:
    """What was started in a sandbox, and is not forgotten."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def list(self) -> List[types.ProcessesProcessesItem]:
        """It does not wake the sandbox, which must run."""
        return items(self._sandbox._call("GET", "/processes"), "processes")

    def start(
        self, command: List[str] | str, *, process: str = "", user: str = "", cwd: str = "", env: dict[str, str] | None = None,
        tty: tuple[int, int] | None = None, no_stdin: bool = False, output_kib: int = 0, hold_output: bool = False,
        timeout_seconds: int = 0, idempotency_key: str | None = NEW,
    ) -> str:
        """Start a process that goes on by itself, and return its name; attach writes to its stdin, unless no_stdin."""
        body = {
            "command": argv(command), "process": process, "user": user, "cwd": cwd, "env": environment(env), "tty": terminal_of(tty),
            "no_stdin": no_stdin, "output_kib": output_kib, "hold_output": hold_output, "timeout_seconds": timeout_seconds,
        }
        body = {k: v for k, v in body.items() if v}
        return str(field(self._sandbox._call("POST", "/processes", body, headers=key_of(idempotency_key)), "process"))

    def attach(self, process: str, *, offset: int = 0) -> Process:
        """Connect to a detached process, in the place of any other stream; output from offset on, as far as it is kept."""
        path = f"{self._sandbox._path}/processes/{segment(process)}/attach?offset={int(offset)}&window={256 << 10}"
        p = Process(self._sandbox.client.http.websocket(path))
        p._begin(None)
        return p

    def signal(self, process: str, number: int) -> None:
        self._sandbox._call("POST", f"/processes/{segment(process)}/signal", {"signal": int(number)})

    def remove(self, process: str) -> None:
        """Kill it if it runs, and forget it."""
        self._sandbox._call("DELETE", f"/processes/{segment(process)}")


class Files:
    """The files of a sandbox. Paths are absolute."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def _request(self, method: str, path: str, **more: Any) -> Response:
        return self._sandbox.client.http.request(method, self._sandbox._path + "/files" + path, **more)

    def read(self, path: str, *, most: int = 64 << 20) -> bytes:
        """Return a file's content, of at most `most` bytes: use stream for more."""
        answer = self._request("GET", query(path=path), retry=True)
        return answer.document(most)

    def stream(self, path: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Yield a file's content, or a part of it, as it comes."""
        headers = {}
        if offset or length is not None:
            if length == 0:
                return
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        answer = self._request("GET", query(path=path), headers=headers, retry=True)
        try:
            while piece := answer.read():
                yield piece
        finally:
            answer.close()

    def write(
        self, path: str, data: Any, *, mode: str = "", parents: bool = False, append: bool = False, uid: int | None = None,
        gid: int | None = None, if_match: str | None = None, if_none_match: str | None = None,
    ) -> types.FileInfo:
        """Write a file: text, bytes, an open file, or an iterable of bytes. mode is octal digits.

        With if_match, only if the file has that ETag; with if_none_match="*", only if there is none.
        """
        headers = {"Content-Type": "application/octet-stream"}
        if if_match:
            headers["If-Match"] = if_match
        if if_none_match:
            headers["If-None-Match"] = if_none_match
        where = query(path=path, mode=mode, parents=parents, append=append, uid=uid, gid=gid)
        answer = self._request("PUT", where, headers=headers, body=body_of(data), retry=not append and not if_match and not if_none_match)
        return cast(types.FileInfo, object_of(answer.document()))

    def stat(self, path: str, *, link: bool = False) -> types.FileInfo:
        """Describe a file; with link, a symbolic link itself."""
        return cast(types.FileInfo, self._sandbox._call("GET", "/files/stat" + query(path=path, link=link)))

    def exists(self, path: str) -> bool:
        try:
            self.stat(path)
        except NotFound as e:
            if e.code != "guest-not-found":
                raise
            return False
        return True

    def list(self, path: str) -> List[types.FileInfo]:
        return items(self._sandbox._call("GET", "/files/list" + query(path=path)), "entries")

    def mkdir(self, path: str, *, mode: str = "", parents: bool = False) -> None:
        self._sandbox._call("POST", "/files/mkdir", {"path": path, "mode": mode, "parents": parents})

    def move(self, source: str, to: str) -> None:
        self._sandbox._call("POST", "/files/move", {"from": source, "to": to})

    def remove(self, path: str, *, recursive: bool = False) -> None:
        self._sandbox._call("DELETE", "/files" + query(path=path, recursive=recursive))

    def download_tree(self, path: str) -> Iterator[bytes]:
        """Yield a tar archive of a directory as it comes."""
        return pieces(self._sandbox.client.http, self._sandbox._path + "/files/tree" + query(path=path))

    def upload_tree(self, path: str, tar: Any, *, uid: int | None = None, gid: int | None = None) -> int:
        """Unpack a tar archive, which is bytes, an open file or an iterable of bytes; return its size."""
        headers = {"Content-Type": "application/x-tar"}
        answer = self._request("PUT", "/tree" + query(path=path, uid=uid, gid=gid), headers=headers, body=body_of(tar))
        return int(field(object_of(answer.document()), "bytes", int))

    def download(self, path: str, to: str) -> None:
        """Copy a directory to a local one, below which all of it stays. It needs as much temporary space."""
        with tempfile.TemporaryFile() as spool:
            for piece in self.download_tree(path):
                in_thread(spool.write, piece)
            spool.seek(0)
            with tarfile.open(fileobj=spool, mode="r:") as archive:
                in_thread(extract, archive, to)

    def upload(self, source: str, path: str) -> int:
        """Copy a local directory into one of the sandbox."""
        return self.upload_tree(path, tar_of(source))

    def watch(self, path: str, *, recursive: bool = False, keep_awake: bool = False) -> Iterator[types.FileEventLine]:
        """Yield what happens to files below a directory; the first event is "ready"."""
        return self._sandbox._lines("/files/watch" + query(path=path, recursive=recursive, keep_awake=keep_awake))


def extract(archive: tarfile.TarFile, to: str) -> None:
    archive.extractall(to, filter="data")


class Secrets:
    """The secrets of a sandbox. Values are never given back."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def list(self) -> List[types.SecretsSecretsItem]:
        return items(self._sandbox._call("GET", "/secrets"), "secrets")

    def set(self, name: str, value: bytes | str | None = None, *, source: str | None = None, **more: Any) -> None:
        """Set a secret to a value, or to that of a source of the host; further arguments are mode, uid, gid, proxy and transient."""
        if value is not None:
            more["value"] = base64.b64encode(body_of(value)).decode()
        if source is not None:
            more["from"] = source
        self._sandbox._call("PUT", "/secrets/" + segment(name), more)

    def remove(self, name: str) -> None:
        self._sandbox._call("DELETE", "/secrets/" + segment(name))


class Services:
    """Programs that the agent of a sandbox keeps running."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def list(self) -> List[types.Service]:
        """It does not wake the sandbox."""
        return items(self._sandbox._call("GET", "/services"), "services")

    def set(self, name: str, argv: List[str], **more: Any) -> types.Service:
        """Add or replace a service; further arguments are fields of the API, such as env, dir, user and image_config."""
        return cast(types.Service, self._sandbox._call("PUT", "/services/" + segment(name), {"argv": argv, **more}))

    def remove(self, name: str) -> None:
        self._sandbox._call("DELETE", "/services/" + segment(name))

    def _do(self, name: str, verb: str) -> types.Service:
        return cast(types.Service, self._sandbox._call("POST", f"/services/{segment(name)}/{verb}", {}))

    def start(self, name: str) -> types.Service:
        return self._do(name, "start")

    def restart(self, name: str) -> types.Service:
        return self._do(name, "restart")

    def stop(self, name: str) -> types.Service:
        """Stop it until it is started, or the sandbox boots."""
        return self._do(name, "stop")

    def wait(self, name: str, *, timeout_seconds: int = 60) -> types.Service:
        """Wait until it is ready, which keeps the sandbox awake: at most 600 s."""
        path = f"/services/{segment(name)}/wait" + query(timeout_seconds=timeout_seconds)
        return cast(types.Service, self._sandbox._call("GET", path, timeout=timeout_seconds + 60))

    def log(self, name: str, *, follow: bool = False) -> Iterator[bytes]:
        """Yield its newest output, and with follow what comes."""
        path = f"{self._sandbox._path}/services/{segment(name)}/log" + query(follow=follow)
        return pieces(self._sandbox.client.http, path, follow=follow)


class Snapshots:
    """The snapshots of all sandboxes."""

    def __init__(self, client: Drowse) -> None:
        self._client = client

    def list(self) -> List[types.SnapshotInfo]:
        return items(self._client.call("GET", "/v1/snapshots"), "snapshots")

    def get(self, id: str) -> types.SnapshotInfo:
        return cast(types.SnapshotInfo, self._client.call("GET", "/v1/snapshots/" + segment(id)))

    def remove(self, id: str) -> None:
        self._client.call("DELETE", "/v1/snapshots/" + segment(id))

    def tag(self, id: str, tags: List[str]) -> types.SnapshotInfo:
        """Replace its tags."""
        return cast(types.SnapshotInfo, self._client.call("POST", f"/v1/snapshots/{segment(id)}/tags", {"tags": tags}))

    def clone(
        self, id: str, *, name: str = "", policy: types.Policy | None = None, idle: Any = None, metadata: dict[str, Any] | None = None,
        idempotency_key: str | None = NEW, timeout: float | None = None,
    ) -> Sandbox:
        """Make a sandbox that goes on from a snapshot."""
        body: dict[str, Any] = {k: v for k, v in {"name": name, "idle": idle, "metadata": metadata}.items() if v}
        if policy is not None:
            body["policy"] = policy
        made = self._client.call("POST", f"/v1/snapshots/{segment(id)}/clone", body, headers=key_of(idempotency_key), timeout=timeout)
        return Sandbox(self._client, field(made, "name"), made)

    def export(self, id: str) -> Iterator[bytes]:
        """Yield a file that import_ reads on another host."""
        return pieces(self._client.http, f"/v1/snapshots/{segment(id)}/export")

    def import_(self, data: Any) -> types.Imported:
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._client.http.request("POST", "/v1/snapshots/import", headers=headers, body=body_of(data))
        return cast(types.Imported, object_of(answer.document()))


class Images:
    """The images of the host."""

    def __init__(self, client: Drowse) -> None:
        self._client = client

    def list(self) -> List[types.Image]:
        return items(self._client.call("GET", "/v1/images"), "images")

    def get(self, ref: str) -> types.Image:
        return cast(types.Image, self._client.call("GET", "/v1/images/" + segment(ref)))

    def remove(self, ref: str) -> types.ImageRemoved:
        return cast(types.ImageRemoved, self._client.call("DELETE", "/v1/images/" + segment(ref)))

    def pull(
        self, source: str, *, tag: str = "", platform: str = "", include: List[str] | None = None, no_cache: bool = False,
        idempotency_key: str | None = NEW,
    ) -> types.Operation:
        """Begin to get an image, docker://REFERENCE or debian:SUITE: operations.wait waits for its end.

        include are further packages of Debian.
        """
        body = {k: v for k, v in {"from": source, "tag": tag, "platform": platform, "include": include, "no_cache": no_cache}.items() if v}
        return cast(types.Operation, self._client.call("POST", "/v1/images/pull", body, headers=key_of(idempotency_key)))

    def import_(self, data: Any, *, tag: str, format: str = "oci-archive") -> types.Image:
        headers = {"Content-Type": "application/octet-stream"}
        answer = self._client.http.request("POST", "/v1/images/import" + query(format=format, tag=tag), headers=headers, body=body_of(data))
        return cast(types.Image, object_of(answer.document()))

    def export(self, ref: str, *, format: str = "") -> Iterator[bytes]:
        return pieces(self._client.http, f"/v1/images/{segment(ref)}/export" + query(format=format))


class Volumes:
    """Disks that outlive their sandboxes."""

    def __init__(self, client: Drowse) -> None:
        self._client = client

    def list(self) -> List[types.Volume]:
        return items(self._client.call("GET", "/v1/volumes"), "volumes")

    def get(self, name: str) -> types.Volume:
        return cast(types.Volume, self._client.call("GET", "/v1/volumes/" + segment(name)))

    def create(self, name: str, size_mib: int, *, idempotency_key: str | None = NEW) -> types.Volume:
        return cast(types.Volume, self._client.call("POST", "/v1/volumes", {"name": name, "size_mib": size_mib}, headers=key_of(idempotency_key)))

    def resize(self, name: str, size_mib: int) -> types.Volume:
        return cast(types.Volume, self._client.call("POST", f"/v1/volumes/{segment(name)}/resize", {"size_mib": size_mib}))

    def remove(self, name: str) -> None:
        self._client.call("DELETE", "/v1/volumes/" + segment(name))


class Operations:
    """What goes on after its request, such as a pull."""

    def __init__(self, client: Drowse) -> None:
        self._client = client

    def list(self) -> List[types.Operation]:
        return items(self._client.call("GET", "/v1/operations"), "operations")

    def get(self, id: str) -> types.Operation:
        return cast(types.Operation, self._client.call("GET", "/v1/operations/" + segment(id)))

    def cancel(self, id: str) -> types.Operation:
        return cast(types.Operation, self._client.call("DELETE", "/v1/operations/" + segment(id)))

    def wait(self, id: str, progress: Callable[[types.Operation], object] | None = None) -> types.Operation:
        """Wait until it has ended, which may be a failure: see "state" and "error". progress gets each change."""
        pause, last = 0.05, None
        while True:
            is_ = self.get(id)
            if progress is not None and is_ != last:
                progress(is_)
            if is_["state"] != "running":
                return is_
            last = is_
            sleep(pause)
            pause = min(1.0, pause * 1.5)


class Templates:
    """First boots from which sandboxes start."""

    def __init__(self, client: Drowse) -> None:
        self._client = client

    def list(self) -> List[types.Template]:
        return items(self._client.call("GET", "/v1/templates"), "templates")

    def get(self, key: str) -> types.Template:
        return cast(types.Template, self._client.call("GET", "/v1/templates/" + segment(key)))

    def create(self, image: str, *, idempotency_key: str | None = NEW, **more: Any) -> types.Operation:
        """Begin to boot one: operations.wait waits for its end. Further arguments are fields of the API, such as memory_mib."""
        return cast(types.Operation, self._client.call("POST", "/v1/templates", {"image": image, **more}, headers=key_of(idempotency_key)))

    def remove(self, key: str) -> None:
        """Remove it. Sandboxes that were made from it stay."""
        self._client.call("DELETE", "/v1/templates/" + segment(key))
