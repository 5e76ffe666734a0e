# Made from sandbox/api/openapi.json by: go test ./sdk/sdktest -run Types -update
"""The objects of the API: dicts, as they are sent."""

from typing import Any, Literal, NotRequired, TypedDict

Empty = dict[str, Any]

EmptyRequest = dict[str, Any]

FlowRecordLine = dict[str, Any]

Object = dict[str, Any]

ChangesRequestGateway = TypedDict("ChangesRequestGateway", {
    "all_public": NotRequired["bool"],
    "guest_tls": NotRequired["list[int] | None"],
    "host": NotRequired["str"],
    "idle_streams": NotRequired["bool"],
    "public_ports": NotRequired["list[int] | None"],
})

ChangesRequestHooks = TypedDict("ChangesRequestHooks", {
    "all_seconds": NotRequired["int"],
    "policy": NotRequired['Literal["", "require", "ignore", "skip"]'],
    "timeout_seconds": NotRequired["int"],
})

ChangesRequestIdle = TypedDict("ChangesRequestIdle", {
    "cpu_percent": NotRequired["int"],
    "sleep_seconds": NotRequired["int"],
})

ChangesRequestKeep = TypedDict("ChangesRequestKeep", {
    "expired_seconds": NotRequired["int"],
    "for_seconds": NotRequired["int"],
    "last": NotRequired["int"],
})

ChangesRequestPersistPromoteItem = TypedDict("ChangesRequestPersistPromoteItem", {
    "path": NotRequired["str"],
    "to": NotRequired["str"],
})

ChangesRequestPersist = TypedDict("ChangesRequestPersist", {
    "drop": NotRequired["list[str] | None"],
    "max_bytes": NotRequired["int"],
    "promote": NotRequired["list[ChangesRequestPersistPromoteItem] | None"],
})

ChangesRequestRotate = TypedDict("ChangesRequestRotate", {
    "at": NotRequired["str"],
    "every_seconds": NotRequired["int"],
    "to": NotRequired["str"],
})

ChangesRequestWake = TypedDict("ChangesRequestWake", {
    "at": NotRequired["str"],
    "every_seconds": NotRequired["int"],
})

ChangesRequest = TypedDict("ChangesRequest", {
    "class": NotRequired['Literal["", "ephemeral", "resumable", "workspace"] | None'],
    "expires": NotRequired["str | None"],
    "gateway": NotRequired["ChangesRequestGateway | None"],
    "hooks": NotRequired["ChangesRequestHooks | None"],
    "idle": NotRequired["ChangesRequestIdle | None"],
    "keep": NotRequired["ChangesRequestKeep | None"],
    "memory_mib": NotRequired["int | None"],
    "new_gateway_token": NotRequired["bool"],
    "no_expiry": NotRequired["bool"],
    "no_rotate": NotRequired["bool"],
    "no_wake": NotRequired["bool"],
    "owner": NotRequired["str | None"],
    "persist": NotRequired["ChangesRequestPersist | None"],
    "policy": NotRequired["PolicyRequest"],
    "purpose": NotRequired["str | None"],
    "reset": NotRequired["bool"],
    "rotate": NotRequired["ChangesRequestRotate | None"],
    "tags": NotRequired["list[str] | None"],
    "vcpus": NotRequired["int | None"],
    "wake": NotRequired["ChangesRequestWake | None"],
})

CloneRequestIdle = TypedDict("CloneRequestIdle", {
    "cpu_percent": NotRequired["int"],
    "sleep_seconds": NotRequired["int"],
})

CloneRequestMetadataAskedFork = TypedDict("CloneRequestMetadataAskedFork", {
    "at": NotRequired["str"],
    "begun": NotRequired["bool"],
    "child": NotRequired["str"],
    "error": NotRequired["str"],
    "id": NotRequired["str"],
})

CloneRequestMetadataAsked = TypedDict("CloneRequestMetadataAsked", {
    "expires": NotRequired["str"],
    "fork": NotRequired["CloneRequestMetadataAskedFork"],
    "from": NotRequired["str"],
    "wake": NotRequired["str"],
})

CloneRequestMetadataE2bNetwork = TypedDict("CloneRequestMetadataE2bNetwork", {
    "allow_out": NotRequired["list[str] | None"],
    "deny_out": NotRequired["list[str] | None"],
    "host": NotRequired["str"],
    "https_ports": NotRequired["list[int] | None"],
    "no_internet": NotRequired["bool"],
    "private": NotRequired["bool"],
})

CloneRequestMetadataE2b = TypedDict("CloneRequestMetadataE2b", {
    "disk_only": NotRequired["bool"],
    "env_vars": NotRequired["dict[str, Any]"],
    "metadata": NotRequired["dict[str, Any]"],
    "network": NotRequired["CloneRequestMetadataE2bNetwork"],
    "pause": NotRequired["bool"],
    "resume": NotRequired["bool"],
    "template": NotRequired["str"],
    "timeout_seconds": NotRequired["int"],
    "user": NotRequired["str"],
    "workdir": NotRequired["str"],
})

CloneRequestMetadataGateway = TypedDict("CloneRequestMetadataGateway", {
    "all_public": NotRequired["bool"],
    "guest_tls": NotRequired["list[int] | None"],
    "host": NotRequired["str"],
    "idle_streams": NotRequired["bool"],
    "public_ports": NotRequired["list[int] | None"],
    "tokens": NotRequired["int"],
})

CloneRequestMetadataKeep = TypedDict("CloneRequestMetadataKeep", {
    "expired_seconds": NotRequired["int"],
    "for_seconds": NotRequired["int"],
    "last": NotRequired["int"],
})

CloneRequestMetadataPersistPromoteItem = TypedDict("CloneRequestMetadataPersistPromoteItem", {
    "path": NotRequired["str"],
    "to": NotRequired["str"],
})

CloneRequestMetadataPersist = TypedDict("CloneRequestMetadataPersist", {
    "drop": NotRequired["list[str] | None"],
    "max_bytes": NotRequired["int"],
    "promote": NotRequired["list[CloneRequestMetadataPersistPromoteItem] | None"],
})

CloneRequestMetadataRotate = TypedDict("CloneRequestMetadataRotate", {
    "at": NotRequired["str"],
    "every_seconds": NotRequired["int"],
    "to": NotRequired["str"],
})

CloneRequestMetadataWake = TypedDict("CloneRequestMetadataWake", {
    "at": NotRequired["str"],
    "every_seconds": NotRequired["int"],
})

CloneRequestMetadata = TypedDict("CloneRequestMetadata", {
    "asked": NotRequired["CloneRequestMetadataAsked"],
    "class": NotRequired['Literal["", "ephemeral", "resumable", "workspace"]'],
    "e2b": NotRequired["CloneRequestMetadataE2b | None"],
    "expires": NotRequired["str"],
    "expiry_told": NotRequired["str"],
    "gateway": NotRequired["CloneRequestMetadataGateway"],
    "keep": NotRequired["CloneRequestMetadataKeep"],
    "owner": NotRequired["str"],
    "persist": NotRequired["CloneRequestMetadataPersist"],
    "purpose": NotRequired["str"],
    "rotate": NotRequired["CloneRequestMetadataRotate"],
    "tags": NotRequired["list[str] | None"],
    "wake": NotRequired["CloneRequestMetadataWake"],
})

CloneRequest = TypedDict("CloneRequest", {
    "idle": NotRequired["CloneRequestIdle | None"],
    "metadata": NotRequired["CloneRequestMetadata"],
    "name": NotRequired["str"],
    "policy": NotRequired["PolicyRequest"],
})

ControlErrorHooksItem = TypedDict("ControlErrorHooksItem", {
    "event": "str",
    "name": "str",
    "output": NotRequired["str"],
    "problem": "str",
})

ControlErrorHostHooksItem = TypedDict("ControlErrorHostHooksItem", {
    "event": "str",
    "name": "str",
    "output": NotRequired["str"],
    "problem": "str",
})

ControlError = TypedDict("ControlError", {
    "code": "str",
    "field": NotRequired["str"],
    "hooks": NotRequired["list[ControlErrorHooksItem] | None"],
    "host_hooks": NotRequired["list[ControlErrorHostHooksItem] | None"],
    "message": "str",
    "op": NotRequired["str"],
    "remedy": NotRequired["str"],
    "sandbox": NotRequired["str"],
})

ControlExit = TypedDict("ControlExit", {
    "cpu_ms": NotRequired["float"],
    "exit_code": "int",
    "not_started": NotRequired["str"],
    "signal": NotRequired["int"],
    "timed_out": NotRequired["bool"],
})

ControlTty = TypedDict("ControlTty", {
    "cols": NotRequired["int"],
    "rows": NotRequired["int"],
    "term": NotRequired["str"],
})

Control = TypedDict("Control", {
    "bytes": NotRequired["int"],
    "cols": NotRequired["int"],
    "command": NotRequired["list[str] | None"],
    "cwd": NotRequired["str"],
    "detach": NotRequired["bool"],
    "env": NotRequired["list[str] | None"],
    "error": NotRequired["ControlError | None"],
    "exit": NotRequired["ControlExit | None"],
    "hold_output": NotRequired["bool"],
    "no_stdin": NotRequired["bool"],
    "offset": NotRequired["int"],
    "output_kib": NotRequired["int"],
    "pid": NotRequired["int"],
    "process": NotRequired["str"],
    "rows": NotRequired["int"],
    "signal": NotRequired["int"],
    "stdin": NotRequired["bool"],
    "timeout_seconds": NotRequired["int"],
    "tty": NotRequired["ControlTty | None"],
    "type": 'Literal["start", "resize", "signal", "eof", "ack", "detach", "started", "exit", "error"]',
    "user": NotRequired["str"],
    "window": NotRequired["int"],
})

CreateRequestMetadataAskedFork = TypedDict("CreateRequestMetadataAskedFork", {
    "at": NotRequired["str"],
    "begun": NotRequired["bool"],
    "child": NotRequired["str"],
    "error": NotRequired["str"],
    "id": NotRequired["str"],
})

CreateRequestMetadataAsked = TypedDict("CreateRequestMetadataAsked", {
    "expires": NotRequired["str"],
    "fork": NotRequired["CreateRequestMetadataAskedFork"],
    "from": NotRequired["str"],
    "wake": NotRequired["str"],
})

CreateRequestMetadataE2bNetwork = TypedDict("CreateRequestMetadataE2bNetwork", {
    "allow_out": NotRequired["list[str] | None"],
    "deny_out": NotRequired["list[str] | None"],
    "host": NotRequired["str"],
    "https_ports": NotRequired["list[int] | None"],
    "no_internet": NotRequired["bool"],
    "private": NotRequired["bool"],
})

CreateRequestMetadataE2b = TypedDict("CreateRequestMetadataE2b", {
    "disk_only": NotRequired["bool"],
    "env_vars": NotRequired["dict[str, Any]"],
    "metadata": NotRequired["dict[str, Any]"],
    "network": NotRequired["CreateRequestMetadataE2bNetwork"],
    "pause": NotRequired["bool"],
    "resume": NotRequired["bool"],
    "template": NotRequired["str"],
    "timeout_seconds": NotRequired["int"],
    "user": NotRequired["str"],
    "workdir": NotRequired["str"],
})

CreateRequestMetadataGateway = TypedDict("CreateRequestMetadataGateway", {
    "all_public": NotRequired["bool"],
    "guest_tls": NotRequired["list[int] | None"],
    "host": NotRequired["str"],
    "idle_streams": NotRequired["bool"],
    "public_ports": NotRequired["list[int] | None"],
    "tokens": NotRequired["int"],
})

CreateRequestMetadataKeep = TypedDict("CreateRequestMetadataKeep", {
    "expired_seconds": NotRequired["int"],
    "for_seconds": NotRequired["int"],
    "last": NotRequired["int"],
})

CreateRequestMetadataPersistPromoteItem = TypedDict("CreateRequestMetadataPersistPromoteItem", {
    "path": NotRequired["str"],
    "to": NotRequired["str"],
})

CreateRequestMetadataPersist = TypedDict("CreateRequestMetadataPersist", {
    "drop": NotRequired["list[str] | None"],
    "max_bytes": NotRequired["int"],
    "promote": NotRequired["list[CreateRequestMetadataPersistPromoteItem] | None"],
})

CreateRequestMetadataRotate = TypedDict("CreateRequestMetadataRotate", {
    "at": NotRequired["str"],
    "every_seconds": NotRequired["int"],
    "to": NotRequired["str"],
})

CreateRequestMetadataWake = TypedDict("CreateRequestMetadataWake", {
    "at": NotRequired["str"],
    "every_seconds": NotRequired["int"],
})

CreateRequestMetadata = TypedDict("CreateRequestMetadata", {
    "asked": NotRequired["CreateRequestMetadataAsked"],
    "class": NotRequired['Literal["", "ephemeral", "resumable", "workspace"]'],
    "e2b": NotRequired["CreateRequestMetadataE2b | None"],
    "expires": NotRequired["str"],
    "expiry_told": NotRequired["str"],
    "gateway": NotRequired["CreateRequestMetadataGateway"],
    "keep": NotRequired["CreateRequestMetadataKeep"],
    "owner": NotRequired["str"],
    "persist": NotRequired["CreateRequestMetadataPersist"],
    "purpose": NotRequired["str"],
    "rotate": NotRequired["CreateRequestMetadataRotate"],
    "tags": NotRequired["list[str] | None"],
    "wake": NotRequired["CreateRequestMetadataWake"],
})

CreateRequestSpecHooks = TypedDict("CreateRequestSpecHooks", {
    "all_seconds": NotRequired["int"],
    "policy": NotRequired['Literal["", "require", "ignore", "skip"]'],
    "timeout_seconds": NotRequired["int"],
})

CreateRequestSpecIdle = TypedDict("CreateRequestSpecIdle", {
    "cpu_percent": NotRequired["int"],
    "sleep_seconds": NotRequired["int"],
})

CreateRequestSpecSelf = TypedDict("CreateRequestSpecSelf", {
    "allow": NotRequired["list[str] | None"],
})

CreateRequestSpecServicesItemCheck = TypedDict("CreateRequestSpecServicesItemCheck", {
    "alive_failures": NotRequired["int"],
    "exec": NotRequired["list[str] | None"],
    "file": NotRequired["str"],
    "http": NotRequired["str"],
    "interval_seconds": NotRequired["int"],
    "start_seconds": NotRequired["int"],
    "tcp": NotRequired["str"],
    "timeout_seconds": NotRequired["int"],
    "unix": NotRequired["str"],
})

CreateRequestSpecServicesItem = TypedDict("CreateRequestSpecServicesItem", {
    "argv": NotRequired["list[str] | None"],
    "backoff_seconds": NotRequired["int"],
    "check": NotRequired["CreateRequestSpecServicesItemCheck | None"],
    "dir": NotRequired["str"],
    "env": NotRequired["list[str] | None"],
    "log_kib": NotRequired["int"],
    "max_backoff_seconds": NotRequired["int"],
    "max_restarts": NotRequired["int"],
    "name": NotRequired["str"],
    "restart": NotRequired["str"],
    "stop_seconds": NotRequired["int"],
    "stop_signal": NotRequired["int"],
    "user": NotRequired["str"],
})

CreateRequestSpecSharesItem = TypedDict("CreateRequestSpecSharesItem", {
    "path": NotRequired["str"],
    "source": NotRequired["str"],
    "writable": NotRequired["bool"],
})

CreateRequestSpecVolumesItem = TypedDict("CreateRequestSpecVolumesItem", {
    "name": NotRequired["str"],
    "path": NotRequired["str"],
    "read_only": NotRequired["bool"],
})

CreateRequestSpec = TypedDict("CreateRequestSpec", {
    "cmdline": NotRequired["str"],
    "disk_mib": NotRequired["int"],
    "disk_quota_mib": NotRequired["int"],
    "hooks": NotRequired["CreateRequestSpecHooks"],
    "hostname": NotRequired["str"],
    "idle": NotRequired["CreateRequestSpecIdle"],
    "image": NotRequired["str"],
    "ipv6": NotRequired["bool"],
    "kernel": NotRequired["str"],
    "memory_mib": NotRequired["int"],
    "name": NotRequired["str"],
    "network": NotRequired["str"],
    "no_acpi": NotRequired["bool"],
    "policy": NotRequired["dict[str, Any] | None"],
    "self": NotRequired["CreateRequestSpecSelf"],
    "services": NotRequired["list[CreateRequestSpecServicesItem] | None"],
    "shares": NotRequired["list[CreateRequestSpecSharesItem] | None"],
    "tags": NotRequired["list[str] | None"],
    "vcpus": NotRequired["int"],
    "volumes": NotRequired["list[CreateRequestSpecVolumesItem] | None"],
})

CreateRequest = TypedDict("CreateRequest", {
    "boot": NotRequired["bool"],
    "disk": NotRequired["str"],
    "get_or_create": NotRequired["bool"],
    "metadata": NotRequired["CreateRequestMetadata"],
    "spec": NotRequired["CreateRequestSpec"],
})

DiffLine = TypedDict("DiffLine", {
    "before": NotRequired["str"],
    "end": NotRequired["bool"],
    "from": NotRequired["str"],
    "gid": "int",
    "kind": NotRequired["str"],
    "mode": NotRequired["str"],
    "more": NotRequired["bool"],
    "op": NotRequired['Literal["added", "changed", "removed"]'],
    "partial": NotRequired["str"],
    "path": NotRequired["str"],
    "size": "int",
    "uid": "int",
})

Directory = TypedDict("Directory", {
    "entries": "list[FileInfo] | None",
})

EntryLineBy = TypedDict("EntryLineBy", {
    "boot": "str",
    "comm": "str",
    "gid": "int",
    "login_uid": NotRequired["int | None"],
    "parent": NotRequired["str"],
    "pid": "int",
    "ppid": "int",
    "start": "int",
    "uid": "int",
})

EntryLineOutcomeChanges = TypedDict("EntryLineOutcomeChanges", {
    "added": NotRequired["list[str] | None"],
    "changed": NotRequired["list[str] | None"],
    "more": NotRequired["int"],
    "partial": NotRequired["str"],
    "removed": NotRequired["list[str] | None"],
})

EntryLineOutcome = TypedDict("EntryLineOutcome", {
    "bytes_in": "int",
    "bytes_out": "int",
    "changes": NotRequired["EntryLineOutcomeChanges | None"],
    "connections": NotRequired["int"],
    "cpu_ms": NotRequired["float"],
    "error": NotRequired["str"],
    "exit": NotRequired["int | None"],
    "exit_signal": NotRequired["int"],
    "started": NotRequired["str"],
    "timed_out": NotRequired["bool"],
})

EntryLine = TypedDict("EntryLine", {
    "address": NotRequired["str"],
    "argv": NotRequired["list[str] | None"],
    "argv_sha256": NotRequired["str"],
    "begin": NotRequired["str"],
    "by": NotRequired["EntryLineBy | None"],
    "detach": NotRequired["bool"],
    "dir": NotRequired["str"],
    "elapsed_ms": NotRequired["float"],
    "end": NotRequired["str"],
    "host_path": NotRequired["str"],
    "id": NotRequired["str"],
    "kind": "str",
    "login": NotRequired["bool"],
    "network": NotRequired["str"],
    "number": NotRequired["int"],
    "outcome": NotRequired["EntryLineOutcome | None"],
    "path": NotRequired["str"],
    "process": NotRequired["str"],
    "pty": NotRequired["bool"],
    "recursive": NotRequired["bool"],
    "status": "str",
    "to": NotRequired["str"],
    "user": NotRequired["str"],
    "via": NotRequired["str"],
})

ErrorErrorHooksItem = TypedDict("ErrorErrorHooksItem", {
    "event": "str",
    "name": "str",
    "output": NotRequired["str"],
    "problem": "str",
})

ErrorErrorHostHooksItem = TypedDict("ErrorErrorHostHooksItem", {
    "event": "str",
    "name": "str",
    "output": NotRequired["str"],
    "problem": "str",
})

ErrorError = TypedDict("ErrorError", {
    "code": "str",
    "field": NotRequired["str"],
    "hooks": NotRequired["list[ErrorErrorHooksItem] | None"],
    "host_hooks": NotRequired["list[ErrorErrorHostHooksItem] | None"],
    "message": "str",
    "op": NotRequired["str"],
    "remedy": NotRequired["str"],
    "sandbox": NotRequired["str"],
})

Error = TypedDict("Error", {
    "error": "ErrorError",
})

EventLineDetails = TypedDict("EventLineDetails", {
    "after": NotRequired["int"],
    "before": NotRequired["int"],
    "booted": NotRequired["str"],
    "bytes": NotRequired["int"],
    "children": NotRequired["list[str] | None"],
    "dropped": NotRequired["list[str] | None"],
    "event": NotRequired["str"],
    "expires": NotRequired["str"],
    "from": NotRequired["str"],
    "hook": NotRequired["str"],
    "milliseconds": NotRequired["float"],
    "parent": NotRequired["str"],
    "path": NotRequired["str"],
    "problem": NotRequired["str"],
    "reason": NotRequired["str"],
    "reset": NotRequired["bool"],
    "snapshot": NotRequired["str"],
    "template": NotRequired["bool"],
})

EventLine = TypedDict("EventLine", {
    "cause": NotRequired["str"],
    "cursor": "int",
    "details": NotRequired["EventLineDetails"],
    "id": NotRequired["str"],
    "owner": NotRequired["str"],
    "sandbox": NotRequired["str"],
    "sandbox_id": NotRequired["str"],
    "tags": NotRequired["list[str] | None"],
    "time": "str",
    "type": "str",
    "version": "int",
})

ExecRequest = TypedDict("ExecRequest", {
    "command": NotRequired["list[str] | None"],
    "cwd": NotRequired["str"],
    "env": NotRequired["list[str] | None"],
    "stdin": NotRequired["str"],
    "timeout_seconds": NotRequired["int"],
    "user": NotRequired["str"],
})

ExecStartRequestTty = TypedDict("ExecStartRequestTty", {
    "cols": NotRequired["int"],
    "rows": NotRequired["int"],
    "term": NotRequired["str"],
})

ExecStartRequest = TypedDict("ExecStartRequest", {
    "command": NotRequired["list[str] | None"],
    "cwd": NotRequired["str"],
    "detach": NotRequired["bool"],
    "env": NotRequired["list[str] | None"],
    "hold_output": NotRequired["bool"],
    "no_stdin": NotRequired["bool"],
    "output_kib": NotRequired["int"],
    "process": NotRequired["str"],
    "stdin": NotRequired["bool"],
    "timeout_seconds": NotRequired["int"],
    "tty": NotRequired["ExecStartRequestTty | None"],
    "user": NotRequired["str"],
    "window": NotRequired["int"],
})

Executed = TypedDict("Executed", {
    "elapsed_ms": "float",
    "exit_code": "int",
    "not_started": NotRequired["str"],
    "signal": NotRequired["int"],
    "stderr": "str",
    "stdout": "str",
    "timed_out": NotRequired["bool"],
    "truncated": NotRequired["bool"],
})

ExtendRequest = TypedDict("ExtendRequest", {
    "until": NotRequired["str"],
})

FileEventLine = TypedDict("FileEventLine", {
    "dir": NotRequired["bool"],
    "event": 'Literal["ready", "created", "written", "attributes", "removed", "renamed", "overflow"]',
    "from": NotRequired["str"],
    "path": NotRequired["str"],
    "problem": NotRequired["str"],
    "time": "str",
})

FileInfo = TypedDict("FileInfo", {
    "etag": NotRequired["str"],
    "gid": "int",
    "kind": 'Literal["file", "dir", "symlink", "fifo", "socket", "block", "char", "other"]',
    "link": NotRequired["str"],
    "mode": "str",
    "modified": "str",
    "name": "str",
    "size": "int",
    "uid": "int",
})

Flows = TypedDict("Flows", {
    "flows": "list[dict[str, Any]] | None",
    "truncated": NotRequired["bool"],
})

ForkRequestChildrenItem = TypedDict("ForkRequestChildrenItem", {
    "name": NotRequired["str"],
    "tags": NotRequired["list[str] | None"],
})

ForkRequest = TypedDict("ForkRequest", {
    "children": NotRequired["list[ForkRequestChildrenItem] | None"],
})

Forked = TypedDict("Forked", {
    "sandboxes": "list[Sandbox] | None",
})

Freed = TypedDict("Freed", {
    "bytes": "int",
    "cache_files": "int",
    "layers": "int",
    "problems": NotRequired["list[str] | None"],
    "snapshots": "int",
})

GatewayAccess = TypedDict("GatewayAccess", {
    "all_public": NotRequired["bool"],
    "guest_tls": NotRequired["list[int] | None"],
    "host": NotRequired["str"],
    "idle_streams": NotRequired["bool"],
    "public_ports": NotRequired["list[int] | None"],
    "token": "str",
})

HealthChecksItem = TypedDict("HealthChecksItem", {
    "name": "str",
    "ok": "bool",
    "problem": NotRequired["str"],
})

Health = TypedDict("Health", {
    "checks": "list[HealthChecksItem] | None",
    "ok": "bool",
})

HistoryRunsItem = TypedDict("HistoryRunsItem", {
    "begun": "str",
    "command": "list[str] | None",
    "cpu_seconds": NotRequired["float"],
    "ended": NotRequired["str"],
    "error": NotRequired["str"],
    "exit": NotRequired["int | None"],
    "id": "str",
    "in_bytes": "int",
    "out_bytes": "int",
    "signal": NotRequired["int"],
    "state": "str",
    "user": NotRequired["str"],
})

HistorySleepsItem = TypedDict("HistorySleepsItem", {
    "asleep": "str",
    "awake": NotRequired["str"],
    "cpu_seconds": "float",
    "network_in_bytes": "int",
    "network_out_bytes": "int",
    "raw_bytes": "int",
    "snapshot": "str",
    "stored_bytes": "int",
})

History = TypedDict("History", {
    "problems": NotRequired["list[str] | None"],
    "runs": "list[HistoryRunsItem] | None",
    "sandbox": "Sandbox",
    "sleeps": "list[HistorySleepsItem] | None",
    "version": "int",
})

Host = TypedDict("Host", {
    "awake_memory_bytes": "int",
    "awake_memory_most_bytes": "int",
    "disk_free_bytes": "int",
    "disk_total_bytes": "int",
    "memory_available_bytes": NotRequired["int"],
    "memory_total_bytes": "int",
    "problems": NotRequired["list[str] | None"],
    "resolvers": "list[str] | None",
    "sandboxes": "dict[str, Any]",
})

ImageLayersItem = TypedDict("ImageLayersItem", {
    "diff_id": "str",
    "digest": NotRequired["str"],
    "media_type": NotRequired["str"],
    "size": "int",
})

ImagePackagesItem = TypedDict("ImagePackagesItem", {
    "architecture": NotRequired["str"],
    "name": "str",
    "version": "str",
})

ImageSkipped = TypedDict("ImageSkipped", {
    "mounts": NotRequired["int"],
    "sockets": NotRequired["int"],
    "times": NotRequired["int"],
    "xattrs": NotRequired["int"],
})

Image = TypedDict("Image", {
    "architecture": "str",
    "base": NotRequired["str"],
    "cmd": "list[str] | None",
    "config": NotRequired["str"],
    "content": "int",
    "created": "str",
    "entrypoint": "list[str] | None",
    "env": "list[str] | None",
    "exposed_ports": NotRequired["list[str] | None"],
    "id": "str",
    "include": "list[str] | None",
    "inodes": "int",
    "labels": NotRequired["dict[str, Any]"],
    "layers": NotRequired["list[ImageLayersItem] | None"],
    "manifest": NotRequired["str"],
    "packages": "list[ImagePackagesItem] | None",
    "passing": NotRequired["bool"],
    "platform": NotRequired["str"],
    "size": "int",
    "skipped": "ImageSkipped",
    "source": "str",
    "spec": "str",
    "steps": NotRequired["list[str] | None"],
    "stop_signal": NotRequired["str"],
    "tagged": "str",
    "tags": "list[str] | None",
    "user": "str",
    "version": "int",
    "workdir": "str",
})

ImageList = TypedDict("ImageList", {
    "images": "list[Image] | None",
    "problems": NotRequired["list[str] | None"],
    "version": "int",
})

ImageRemoved = TypedDict("ImageRemoved", {
    "deleted": "bool",
    "id": "str",
    "untagged": "list[str] | None",
})

Imported = TypedDict("Imported", {
    "base": NotRequired["str"],
    "created": "str",
    "depth": "int",
    "dropped": "list[str] | None",
    "exclusive_bytes": "int",
    "id": "str",
    "kept": NotRequired["bool"],
    "kind": "str",
    "note": NotRequired["str"],
    "problem": NotRequired["str"],
    "ram_bytes": "int",
    "stored_bytes": "int",
    "tags": NotRequired["list[str] | None"],
    "vm": "str",
    "vm_id": NotRequired["str"],
})

Is = TypedDict("Is", {
    "api": "int",
    "owner": NotRequired["str"],
    "scope": 'Literal["read", "write"]',
    "scopes": "list[str] | None",
    "version": "str",
})

List = TypedDict("List", {
    "next": NotRequired["str"],
    "problems": NotRequired["list[str] | None"],
    "sandboxes": "list[Sandbox] | None",
    "version": "int",
})

MakeVolumeRequest = TypedDict("MakeVolumeRequest", {
    "name": NotRequired["str"],
    "size_mib": NotRequired["int"],
})

MigrateRequest = TypedDict("MigrateRequest", {
    "hooks": NotRequired['Literal["", "require", "ignore", "skip"]'],
    "to": NotRequired["str"],
})

MigrateResult = TypedDict("MigrateResult", {
    "asleep": NotRequired["bool"],
    "bytes_ahead": "int",
    "bytes_pause": "int",
    "downtime_ms": "float",
    "from": "str",
    "name": "str",
    "problem": NotRequired["str"],
    "snapshot": "str",
    "stages_ms": "dict[str, Any]",
    "to": "str",
})

MkdirRequest = TypedDict("MkdirRequest", {
    "mode": NotRequired["str"],
    "parents": NotRequired["bool"],
    "path": NotRequired["str"],
})

MoveRequest = TypedDict("MoveRequest", {
    "from": NotRequired["str"],
    "to": NotRequired["str"],
})

Moved = TypedDict("Moved", {
    "bytes": "int",
})

NetEventLine = TypedDict("NetEventLine", {
    "bytes": "int",
    "direction": 'Literal["", "egress", "ingress"]',
    "ethertype": "int",
    "guest": "str",
    "guest_port": NotRequired["int"],
    "host": NotRequired["str"],
    "lost": NotRequired["int"],
    "name": NotRequired["str"],
    "peer": NotRequired["str"],
    "peer_port": NotRequired["int"],
    "protocol": NotRequired["str"],
    "reason": "str",
    "rule": NotRequired["str"],
    "secret": NotRequired["str"],
    "server_name": NotRequired["str"],
    "status": NotRequired["int"],
    "suppressed": NotRequired["int"],
    "time": "str",
    "verdict": 'Literal["", "allow", "deny"]',
})

NetworkStatsCountersItem = TypedDict("NetworkStatsCountersItem", {
    "bytes": "int",
    "direction": 'Literal["", "egress", "ingress"]',
    "packets": "int",
    "reason": "str",
    "verdict": 'Literal["", "allow", "deny"]',
})

NetworkStatsDns = TypedDict("NetworkStatsDns", {
    "answered": "int",
    "dropped": "int",
    "failed": "int",
    "rebound": "int",
    "refused": "int",
})

NetworkStatsEgress = TypedDict("NetworkStatsEgress", {
    "bytes": "int",
    "idle": "int",
})

NetworkStatsIngress = TypedDict("NetworkStatsIngress", {
    "bytes": "int",
    "idle": "int",
})

NetworkStatsProcess = TypedDict("NetworkStatsProcess", {
    "cpu_seconds": "float",
    "failed": "int",
    "refused": "int",
    "starts": "int",
})

NetworkStatsProxy = TypedDict("NetworkStatsProxy", {
    "busy": "int",
    "cut": "int",
    "injected": "int",
    "open": "int",
    "refused": "int",
    "requests": "int",
    "tunnels": "int",
})

NetworkStatsTls = TypedDict("NetworkStatsTls", {
    "cut": "int",
    "failed": "int",
    "open": "int",
    "passed": "int",
    "refused": "int",
})

NetworkStats = TypedDict("NetworkStats", {
    "address": "str",
    "address6": NotRequired["str"],
    "counters": "list[NetworkStatsCountersItem] | None",
    "dns": "NetworkStatsDns",
    "egress": "NetworkStatsEgress",
    "ingress": "NetworkStatsIngress",
    "name": "str",
    "process": "NetworkStatsProcess",
    "proxy": NotRequired["NetworkStatsProxy | None"],
    "tap": "str",
    "tls": "NetworkStatsTls",
    "warnings": NotRequired["list[str] | None"],
})

OperationErrorHooksItem = TypedDict("OperationErrorHooksItem", {
    "event": "str",
    "name": "str",
    "output": NotRequired["str"],
    "problem": "str",
})

OperationErrorHostHooksItem = TypedDict("OperationErrorHostHooksItem", {
    "event": "str",
    "name": "str",
    "output": NotRequired["str"],
    "problem": "str",
})

OperationError = TypedDict("OperationError", {
    "code": "str",
    "field": NotRequired["str"],
    "hooks": NotRequired["list[OperationErrorHooksItem] | None"],
    "host_hooks": NotRequired["list[OperationErrorHostHooksItem] | None"],
    "message": "str",
    "op": NotRequired["str"],
    "remedy": NotRequired["str"],
    "sandbox": NotRequired["str"],
})

Operation = TypedDict("Operation", {
    "begun": "str",
    "done": "int",
    "ended": NotRequired["str | None"],
    "error": NotRequired["OperationError | None"],
    "id": "str",
    "image": NotRequired["str"],
    "kind": "str",
    "stage": NotRequired["str"],
    "state": 'Literal["running", "done", "failed", "canceled"]',
    "template": NotRequired["str"],
    "total": "int",
})

Operations = TypedDict("Operations", {
    "operations": "list[Operation] | None",
})

PolicyDefault = TypedDict("PolicyDefault", {
    "egress": NotRequired['Literal["allow", "deny", "reject", ""] | None'],
    "ingress": NotRequired['Literal["allow", "deny", "reject", ""] | None'],
})

PolicyDns = TypedDict("PolicyDns", {
    "queries_per_second": NotRequired["int"],
    "upstreams": NotRequired["list[str] | None"],
})

PolicyLimitsEgressBits = TypedDict("PolicyLimitsEgressBits", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyLimitsEgressConnections = TypedDict("PolicyLimitsEgressConnections", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyLimitsEgressPackets = TypedDict("PolicyLimitsEgressPackets", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyLimitsEgress = TypedDict("PolicyLimitsEgress", {
    "bits": NotRequired["PolicyLimitsEgressBits | None"],
    "connections": NotRequired["PolicyLimitsEgressConnections | None"],
    "packets": NotRequired["PolicyLimitsEgressPackets | None"],
})

PolicyLimitsIngressBits = TypedDict("PolicyLimitsIngressBits", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyLimitsIngressConnections = TypedDict("PolicyLimitsIngressConnections", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyLimitsIngressPackets = TypedDict("PolicyLimitsIngressPackets", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyLimitsIngress = TypedDict("PolicyLimitsIngress", {
    "bits": NotRequired["PolicyLimitsIngressBits | None"],
    "connections": NotRequired["PolicyLimitsIngressConnections | None"],
    "packets": NotRequired["PolicyLimitsIngressPackets | None"],
})

PolicyLimits = TypedDict("PolicyLimits", {
    "egress": NotRequired["PolicyLimitsEgress | None"],
    "ingress": NotRequired["PolicyLimitsIngress | None"],
})

PolicyProxyInjectItem = TypedDict("PolicyProxyInjectItem", {
    "header": "str",
    "hosts": "list[str]",
    "ports": NotRequired["list[int | str] | None"],
    "prefix": NotRequired["str | None"],
    "secret": "str",
})

PolicyProxy = TypedDict("PolicyProxy", {
    "enabled": NotRequired["bool | None"],
    "inject": NotRequired["list[PolicyProxyInjectItem] | None"],
})

PolicyPublishItem = TypedDict("PolicyPublishItem", {
    "listen": "str",
    "port": "int",
    "protocol": 'Literal["tcp", "udp"]',
})

PolicyQuota = TypedDict("PolicyQuota", {
    "egress_bytes": NotRequired["int | None"],
    "ingress_bytes": NotRequired["int | None"],
})

PolicyRulesItem = TypedDict("PolicyRulesItem", {
    "agents": NotRequired["list[str] | None"],
    "cidrs": NotRequired["list[str] | None"],
    "direction": 'Literal["egress", "ingress"]',
    "groups": NotRequired['list[Literal["any", "public", "private", "host", "metadata", "link-local", "loopback", "multicast"]] | None'],
    "name": NotRequired["str"],
    "names": NotRequired["list[str] | None"],
    "ports": NotRequired["list[int | str] | None"],
    "protocols": NotRequired['list[Literal["tcp", "udp", "icmp", "any"]] | None'],
    "tls": NotRequired["list[int | str] | None"],
    "verdict": NotRequired['Literal["allow", "deny", "reject", ""] | None'],
})

Policy = TypedDict("Policy", {
    "default": NotRequired["PolicyDefault | None"],
    "dns": NotRequired["PolicyDns | None"],
    "flows": NotRequired["int"],
    "limits": NotRequired["PolicyLimits | None"],
    "proxy": NotRequired["PolicyProxy | None"],
    "publish": NotRequired["list[PolicyPublishItem] | None"],
    "quota": NotRequired["PolicyQuota | None"],
    "rules": NotRequired["list[PolicyRulesItem] | None"],
    "version": NotRequired["Literal[1]"],
})

PolicyRequestDefault = TypedDict("PolicyRequestDefault", {
    "egress": NotRequired['Literal["allow", "deny", "reject", ""] | None'],
    "ingress": NotRequired['Literal["allow", "deny", "reject", ""] | None'],
})

PolicyRequestDns = TypedDict("PolicyRequestDns", {
    "queries_per_second": NotRequired["int"],
    "upstreams": NotRequired["list[str] | None"],
})

PolicyRequestLimitsEgressBits = TypedDict("PolicyRequestLimitsEgressBits", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyRequestLimitsEgressConnections = TypedDict("PolicyRequestLimitsEgressConnections", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyRequestLimitsEgressPackets = TypedDict("PolicyRequestLimitsEgressPackets", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyRequestLimitsEgress = TypedDict("PolicyRequestLimitsEgress", {
    "bits": NotRequired["PolicyRequestLimitsEgressBits | None"],
    "connections": NotRequired["PolicyRequestLimitsEgressConnections | None"],
    "packets": NotRequired["PolicyRequestLimitsEgressPackets | None"],
})

PolicyRequestLimitsIngressBits = TypedDict("PolicyRequestLimitsIngressBits", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyRequestLimitsIngressConnections = TypedDict("PolicyRequestLimitsIngressConnections", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyRequestLimitsIngressPackets = TypedDict("PolicyRequestLimitsIngressPackets", {
    "burst": NotRequired["int"],
    "per_second": "int",
})

PolicyRequestLimitsIngress = TypedDict("PolicyRequestLimitsIngress", {
    "bits": NotRequired["PolicyRequestLimitsIngressBits | None"],
    "connections": NotRequired["PolicyRequestLimitsIngressConnections | None"],
    "packets": NotRequired["PolicyRequestLimitsIngressPackets | None"],
})

PolicyRequestLimits = TypedDict("PolicyRequestLimits", {
    "egress": NotRequired["PolicyRequestLimitsEgress | None"],
    "ingress": NotRequired["PolicyRequestLimitsIngress | None"],
})

PolicyRequestProxyInjectItem = TypedDict("PolicyRequestProxyInjectItem", {
    "header": "str",
    "hosts": "list[str]",
    "ports": NotRequired["list[int | str] | None"],
    "prefix": NotRequired["str | None"],
    "secret": "str",
})

PolicyRequestProxy = TypedDict("PolicyRequestProxy", {
    "enabled": NotRequired["bool | None"],
    "inject": NotRequired["list[PolicyRequestProxyInjectItem] | None"],
})

PolicyRequestPublishItem = TypedDict("PolicyRequestPublishItem", {
    "listen": "str",
    "port": "int",
    "protocol": 'Literal["tcp", "udp"]',
})

PolicyRequestQuota = TypedDict("PolicyRequestQuota", {
    "egress_bytes": NotRequired["int | None"],
    "ingress_bytes": NotRequired["int | None"],
})

PolicyRequestRulesItem = TypedDict("PolicyRequestRulesItem", {
    "agents": NotRequired["list[str] | None"],
    "cidrs": NotRequired["list[str] | None"],
    "direction": 'Literal["egress", "ingress"]',
    "groups": NotRequired['list[Literal["any", "public", "private", "host", "metadata", "link-local", "loopback", "multicast"]] | None'],
    "name": NotRequired["str"],
    "names": NotRequired["list[str] | None"],
    "ports": NotRequired["list[int | str] | None"],
    "protocols": NotRequired['list[Literal["tcp", "udp", "icmp", "any"]] | None'],
    "tls": NotRequired["list[int | str] | None"],
    "verdict": NotRequired['Literal["allow", "deny", "reject", ""] | None'],
})

PolicyRequest = TypedDict("PolicyRequest", {
    "default": NotRequired["PolicyRequestDefault | None"],
    "dns": NotRequired["PolicyRequestDns | None"],
    "flows": NotRequired["int"],
    "limits": NotRequired["PolicyRequestLimits | None"],
    "proxy": NotRequired["PolicyRequestProxy | None"],
    "publish": NotRequired["list[PolicyRequestPublishItem] | None"],
    "quota": NotRequired["PolicyRequestQuota | None"],
    "rules": NotRequired["list[PolicyRequestRulesItem] | None"],
    "version": NotRequired["Literal[1]"],
})

PolicyResultNetwork = TypedDict("PolicyResultNetwork", {
    "address": "str",
    "address6": NotRequired["str"],
    "tap": "str",
    "warnings": NotRequired["list[str] | None"],
})

PolicyResult = TypedDict("PolicyResult", {
    "live": "bool",
    "name": "str",
    "network": NotRequired["PolicyResultNetwork | None"],
})

ProcessesProcessesItemExit = TypedDict("ProcessesProcessesItemExit", {
    "cpu_ms": NotRequired["float"],
    "exit_code": "int",
    "not_started": NotRequired["str"],
    "signal": NotRequired["int"],
    "timed_out": NotRequired["bool"],
})

ProcessesProcessesItem = TypedDict("ProcessesProcessesItem", {
    "attached": "bool",
    "command": "list[str] | None",
    "detached": "bool",
    "exit": NotRequired["ProcessesProcessesItemExit | None"],
    "output_end": "int",
    "output_start": "int",
    "pid": "int",
    "process": "str",
    "started": "str",
    "tty": NotRequired["bool"],
})

Processes = TypedDict("Processes", {
    "processes": "list[ProcessesProcessesItem] | None",
})

PromotedPromotedItem = TypedDict("PromotedPromotedItem", {
    "at": "str",
    "bytes": "int",
    "entries": "int",
    "path": "str",
    "skipped": NotRequired["list[str] | None"],
    "skipped_count": NotRequired["int"],
})

Promoted = TypedDict("Promoted", {
    "promoted": "list[PromotedPromotedItem] | None",
})

PruneRequest = TypedDict("PruneRequest", {
    "dry_run": NotRequired["bool"],
})

PrunedAbandonedItem = TypedDict("PrunedAbandonedItem", {
    "bytes": NotRequired["int"],
    "id": "str",
    "name": NotRequired["str"],
    "why": "str",
})

PrunedRemoveItem = TypedDict("PrunedRemoveItem", {
    "bytes": NotRequired["int"],
    "id": "str",
    "name": NotRequired["str"],
    "why": "str",
})

PrunedSleepItem = TypedDict("PrunedSleepItem", {
    "bytes": NotRequired["int"],
    "id": "str",
    "name": NotRequired["str"],
    "why": "str",
})

Pruned = TypedDict("Pruned", {
    "abandoned": NotRequired["list[PrunedAbandonedItem] | None"],
    "bytes": "int",
    "cache_files": "int",
    "dry_run": NotRequired["bool"],
    "histories": "int",
    "layers": "int",
    "problems": NotRequired["list[str] | None"],
    "remove": "list[PrunedRemoveItem] | None",
    "sleep": "list[PrunedSleepItem] | None",
})

PullRequest = TypedDict("PullRequest", {
    "from": NotRequired["str"],
    "include": NotRequired["list[str] | None"],
    "no_cache": NotRequired["bool"],
    "platform": NotRequired["str"],
    "tag": NotRequired["str"],
})

RenameRequest = TypedDict("RenameRequest", {
    "to": NotRequired["str"],
})

ResizeVolumeRequest = TypedDict("ResizeVolumeRequest", {
    "size_mib": NotRequired["int"],
})

RestoreRequest = TypedDict("RestoreRequest", {
    "snapshot": NotRequired["str"],
})

SandboxKeep = TypedDict("SandboxKeep", {
    "expired_seconds": NotRequired["int"],
    "for_seconds": NotRequired["int"],
    "last": NotRequired["int"],
})

SandboxPersistPromoteItem = TypedDict("SandboxPersistPromoteItem", {
    "path": "str",
    "to": "str",
})

SandboxPersist = TypedDict("SandboxPersist", {
    "drop": NotRequired["list[str] | None"],
    "max_bytes": NotRequired["int"],
    "promote": NotRequired["list[SandboxPersistPromoteItem] | None"],
})

Sandbox = TypedDict("Sandbox", {
    "class": 'Literal["", "ephemeral", "resumable", "workspace"]',
    "confined": NotRequired["bool"],
    "created": "str",
    "disk_mib": "int",
    "exit": NotRequired["str"],
    "expires": NotRequired["str"],
    "fork_point": NotRequired["str"],
    "generation": NotRequired["int"],
    "hooks": NotRequired["str"],
    "host": NotRequired["str"],
    "id": "str",
    "idle_seconds": NotRequired["int"],
    "image": "str",
    "image_id": NotRequired["str"],
    "keep": NotRequired["SandboxKeep"],
    "kernel": NotRequired["str"],
    "memory_mib": "int",
    "name": "str",
    "network": "str",
    "next_wake": NotRequired["str"],
    "owner": NotRequired["str"],
    "parent": NotRequired["str"],
    "parent_id": NotRequired["str"],
    "persist": NotRequired["SandboxPersist"],
    "policy_sha256": NotRequired["str"],
    "problem": NotRequired["str"],
    "purpose": NotRequired["str"],
    "removed": NotRequired["str"],
    "snapshot": NotRequired["str"],
    "status": 'Literal["creating", "running", "waiting", "asleep", "stopped", "crashed", "failed", "expired"]',
    "tags": "list[str] | None",
    "vcpus": "int",
})

SecretSourcesSourcesItem = TypedDict("SecretSourcesSourcesItem", {
    "all_owners": NotRequired["bool"],
    "kind": 'Literal["file", "command", "env", "credential"]',
    "name": "str",
    "owners": NotRequired["list[str] | None"],
})

SecretSources = TypedDict("SecretSources", {
    "sources": "list[SecretSourcesSourcesItem] | None",
})

SecretsSecretsItem = TypedDict("SecretsSecretsItem", {
    "from": NotRequired["str"],
    "gid": NotRequired["int"],
    "kept": "bool",
    "mode": NotRequired["int"],
    "name": "str",
    "present": "bool",
    "proxy": NotRequired["bool"],
    "size": "int",
    "uid": NotRequired["int"],
})

Secrets = TypedDict("Secrets", {
    "secrets": "list[SecretsSecretsItem] | None",
})

ServiceCheck = TypedDict("ServiceCheck", {
    "alive_failures": NotRequired["int"],
    "exec": NotRequired["list[str] | None"],
    "file": NotRequired["str"],
    "http": NotRequired["str"],
    "interval_seconds": NotRequired["int"],
    "start_seconds": NotRequired["int"],
    "tcp": NotRequired["str"],
    "timeout_seconds": NotRequired["int"],
    "unix": NotRequired["str"],
})

Service = TypedDict("Service", {
    "argv": "list[str] | None",
    "backoff_seconds": NotRequired["int"],
    "check": NotRequired["ServiceCheck | None"],
    "check_problem": NotRequired["str"],
    "check_restarts": NotRequired["int"],
    "dir": NotRequired["str"],
    "ended": NotRequired["str | None"],
    "env": NotRequired["list[str] | None"],
    "exit_code": NotRequired["int | None"],
    "log_kib": NotRequired["int"],
    "max_backoff_seconds": NotRequired["int"],
    "max_restarts": NotRequired["int"],
    "name": "str",
    "pid": NotRequired["int"],
    "problem": NotRequired["str"],
    "ready": "bool",
    "ready_at": NotRequired["str | None"],
    "restart": NotRequired["str"],
    "restarts": "int",
    "started": NotRequired["str | None"],
    "state": NotRequired["str"],
    "stop_seconds": NotRequired["int"],
    "stop_signal": NotRequired["int"],
    "user": NotRequired["str"],
})

Services = TypedDict("Services", {
    "services": "list[Service] | None",
})

SetSecretRequest = TypedDict("SetSecretRequest", {
    "from": NotRequired["str"],
    "gid": NotRequired["int"],
    "mode": NotRequired["int"],
    "proxy": NotRequired["bool"],
    "transient": NotRequired["bool"],
    "uid": NotRequired["int"],
    "value": NotRequired["str"],
})

SetServiceRequestCheck = TypedDict("SetServiceRequestCheck", {
    "alive_failures": NotRequired["int"],
    "exec": NotRequired["list[str] | None"],
    "file": NotRequired["str"],
    "http": NotRequired["str"],
    "interval_seconds": NotRequired["int"],
    "start_seconds": NotRequired["int"],
    "tcp": NotRequired["str"],
    "timeout_seconds": NotRequired["int"],
    "unix": NotRequired["str"],
})

SetServiceRequest = TypedDict("SetServiceRequest", {
    "argv": NotRequired["list[str] | None"],
    "backoff_seconds": NotRequired["int"],
    "check": NotRequired["SetServiceRequestCheck | None"],
    "dir": NotRequired["str"],
    "env": NotRequired["list[str] | None"],
    "image_config": NotRequired["bool"],
    "log_kib": NotRequired["int"],
    "max_backoff_seconds": NotRequired["int"],
    "max_restarts": NotRequired["int"],
    "name": NotRequired["str"],
    "restart": NotRequired["str"],
    "stop_seconds": NotRequired["int"],
    "stop_signal": NotRequired["int"],
    "user": NotRequired["str"],
})

SignalRequest = TypedDict("SignalRequest", {
    "signal": NotRequired["int"],
})

SleepRequest = TypedDict("SleepRequest", {
    "durable": NotRequired["bool"],
    "hooks": NotRequired['Literal["", "require", "ignore", "skip"]'],
})

SleepResultHooksItem = TypedDict("SleepResultHooksItem", {
    "event": "str",
    "name": "str",
    "output": NotRequired["str"],
    "problem": "str",
})

SleepResultHostHooksItem = TypedDict("SleepResultHostHooksItem", {
    "event": "str",
    "name": "str",
    "output": NotRequired["str"],
    "problem": "str",
})

SleepResultPersistDroppedItem = TypedDict("SleepResultPersistDroppedItem", {
    "bytes": "int",
    "entries": "int",
    "kept": NotRequired["int"],
    "mounts": NotRequired["int"],
    "path": "str",
})

SleepResultPersistPromotedItem = TypedDict("SleepResultPersistPromotedItem", {
    "at": "str",
    "bytes": "int",
    "entries": "int",
    "path": "str",
    "skipped": NotRequired["list[str] | None"],
    "skipped_count": NotRequired["int"],
})

SleepResultPersist = TypedDict("SleepResultPersist", {
    "disk_bytes": NotRequired["int"],
    "dropped": NotRequired["list[SleepResultPersistDroppedItem] | None"],
    "problems": NotRequired["list[str] | None"],
    "promoted": NotRequired["list[SleepResultPersistPromotedItem] | None"],
})

SleepResult = TypedDict("SleepResult", {
    "asleep": NotRequired["str"],
    "awake": NotRequired["str"],
    "bytes_raw": "int",
    "bytes_shared": "int",
    "bytes_stored": "int",
    "cpu_seconds": NotRequired["float"],
    "faults": "int",
    "hooks": NotRequired["list[SleepResultHooksItem] | None"],
    "host_hooks": NotRequired["list[SleepResultHostHooksItem] | None"],
    "mib_touched": "float",
    "name": "str",
    "network_in_bytes": NotRequired["int"],
    "network_out_bytes": NotRequired["int"],
    "pages_changed": "int",
    "pages_free": "int",
    "persist": NotRequired["SleepResultPersist | None"],
    "problem": NotRequired["str"],
    "snapshot": "str",
    "stages_ms": "dict[str, Any]",
})

SnapshotInfo = TypedDict("SnapshotInfo", {
    "base": NotRequired["str"],
    "created": "str",
    "depth": "int",
    "exclusive_bytes": "int",
    "id": "str",
    "kept": NotRequired["bool"],
    "kind": "str",
    "note": NotRequired["str"],
    "problem": NotRequired["str"],
    "ram_bytes": "int",
    "stored_bytes": "int",
    "tags": NotRequired["list[str] | None"],
    "vm": "str",
    "vm_id": NotRequired["str"],
})

SnapshotRequest = TypedDict("SnapshotRequest", {
    "disk_only": NotRequired["bool"],
    "hooks": NotRequired['Literal["", "require", "ignore", "skip"]'],
    "note": NotRequired["str"],
})

Snapshots = TypedDict("Snapshots", {
    "snapshots": "list[SnapshotInfo] | None",
    "version": "int",
})

Started = TypedDict("Started", {
    "pid": "int",
    "process": "str",
})

StatsHost = TypedDict("StatsHost", {
    "awake_ms": "float",
    "confined": "bool",
    "cpu_system_ms": "float",
    "cpu_throttled_ms": "float",
    "cpu_user_ms": "float",
    "disk_quota": "int",
    "disk_read": "int",
    "disk_used": "int",
    "disk_written": "int",
    "faults": "int",
    "hung": "bool",
    "memory_private": "int",
    "memory_shared": "int",
    "memory_swapped": "int",
    "mib_touched": "float",
    "pid": "int",
})

Stats = TypedDict("Stats", {
    "guest": NotRequired["dict[str, Any] | None"],
    "host": "StatsHost",
    "name": "str",
    "problem": NotRequired["str"],
    "time": "str",
})

StopRequest = TypedDict("StopRequest", {
    "kill": NotRequired["bool"],
    "timeout_seconds": NotRequired["int"],
})

TagsRequest = TypedDict("TagsRequest", {
    "tags": NotRequired["list[str] | None"],
})

Template = TypedDict("Template", {
    "cmdline": NotRequired["str"],
    "created": NotRequired["str | None"],
    "disk_mib": NotRequired["int"],
    "image": "str",
    "ipv6": NotRequired["bool"],
    "kernel": NotRequired["str"],
    "key": "str",
    "memory_mib": NotRequired["int"],
    "network": NotRequired["str"],
    "no_acpi": NotRequired["bool"],
    "problem": NotRequired["str"],
    "snapshot": NotRequired["str"],
    "state": 'Literal["ready", "wanted", "failed"]',
    "stored_bytes": "int",
    "used": "str",
    "vcpus": NotRequired["int"],
})

TemplateSpecRequest = TypedDict("TemplateSpecRequest", {
    "cmdline": NotRequired["str"],
    "disk_mib": NotRequired["int"],
    "image": NotRequired["str"],
    "ipv6": NotRequired["bool"],
    "kernel": NotRequired["str"],
    "memory_mib": NotRequired["int"],
    "network": NotRequired["str"],
    "no_acpi": NotRequired["bool"],
    "vcpus": NotRequired["int"],
})

Templates = TypedDict("Templates", {
    "problems": NotRequired["list[str] | None"],
    "templates": "list[Template] | None",
})

VolumeSettled = TypedDict("VolumeSettled", {
    "snapshot": "str",
    "vm": "str",
})

VolumeUsersItem = TypedDict("VolumeUsersItem", {
    "path": "str",
    "phase": "str",
    "read_only": "bool",
    "vm": "str",
})

Volume = TypedDict("Volume", {
    "allocated_bytes": "int",
    "created": "str",
    "generation": "int",
    "id": "str",
    "name": "str",
    "settled": NotRequired["VolumeSettled | None"],
    "size_bytes": "int",
    "used_by": "list[str] | None",
    "users": "list[VolumeUsersItem] | None",
})

Volumes = TypedDict("Volumes", {
    "volumes": "list[Volume] | None",
})
