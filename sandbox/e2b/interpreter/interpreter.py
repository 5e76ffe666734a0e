#!/usr/bin/python3
"""Runs code for E2B's code interpreter SDK: HTTP on 127.0.0.1:49999, an ipykernel for each context.

It needs Debian's python3-ipykernel, python3-jupyter-client and python3-tornado. It checks no tokens: whoever reaches
its port may run code as its user. Clients from outside come through drowse's gateway, which does check them.
"""
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
import uuid

import tornado.iostream
import tornado.web
import zmq
import zmq.asyncio
from jupyter_client.manager import AsyncKernelManager

PORT = 49999
MAX_CODE = 1 << 20  # bytes
MAX_BODY = 8 << 20  # bytes: code whose characters are escaped, and variables
MAX_OUTPUT = 16 << 20  # bytes of an execution, as JSON
MAX_MESSAGES = 100_000  # of an execution: an empty one takes memory, too
MAX_CONTEXTS = 16
MAX_EXECUTIONS = 64  # that run or wait, in all contexts
MAX_ENV = 256  # variables of an execution
START_TIME = 120  # seconds: a kernel on a slow machine
INTERRUPTS = (2, 8, 20)  # seconds to wait after each; then a kernel that ignores them is restarted
GRACE = 30  # seconds for what takes none of its own
DEFAULT = "default"
ENVS = "/run/e2b/envs.json"  # variables of the sandbox, which the host writes
MAX_ENVS = 128 << 10  # bytes of it

FIELDS = {
    "text/plain": "text", "text/html": "html", "text/markdown": "markdown", "image/svg+xml": "svg", "image/png": "png",
    "image/jpeg": "jpeg", "application/pdf": "pdf", "text/latex": "latex", "application/json": "json",
    "application/javascript": "javascript",
}
# Other representations keep their MIME type as their name, unless that is one of these.
TAKEN = {"type", "is_main_result"}

# Set variables for one execution, and undo that. The old values wait in the kernel.
SET_ENV = """(lambda os, new: setattr(os, "_drowse_env", [(k, os.environ.get(k)) for k in new]) or os.environ.update(new)
)(__import__("os"), %r)"""
UNSET_ENV = """[(lambda os, k, v: os.environ.pop(k, None) if v is None else os.environ.__setitem__(k, v))(__import__("os"), *kv)
for kv in __import__("os").__dict__.pop("_drowse_env", [])]"""


# Sets and removes variables of the sandbox, for all that follows.
CHANGE_ENV = """(lambda e, gone, new: [e.pop(k, None) for k in gone] and None or e.update(new))(__import__("os").environ, %r, %r)"""


def sandbox_env():
    """Returns the variables of the sandbox. A clone of a warm kernel finds others than it began with."""
    try:
        with open(ENVS, "rb") as f:
            env = json.loads(f.read(MAX_ENVS))
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in env.items() if variable(k, v)} if isinstance(env, dict) else {}


class Died(Exception):
    """The kernel has ended."""


class Execution:
    """One cell of a context, whose output waits for the client."""

    def __init__(self):
        self.msg_id = None
        self.lines = asyncio.Queue()  # None is the end; MAX_OUTPUT bounds it
        self.size = self.messages = 0
        self.left = False  # the client has gone
        self.over = False
        self.idle = asyncio.Event()
        self.wake = asyncio.Event()  # something that ends it early

    def put(self, **line):
        text = json.dumps(line) + "\n"  # in ASCII: the SDK decodes pieces that may end within a character
        self.size += len(text)
        self.messages += 1
        if self.size > MAX_OUTPUT or self.messages > MAX_MESSAGES:
            self.overflow()
        elif not self.left:
            self.lines.put_nowait(text)

    def overflow(self):
        self.over = True
        self.wake.set()

    def message(self, msg):
        kind, content = msg["header"]["msg_type"], msg["content"]
        if kind == "status":
            if content.get("execution_state") == "idle":
                self.idle.set()
        elif self.over:
            return
        elif kind == "stream":
            name = "stderr" if content["name"] == "stderr" else "stdout"
            self.put(type=name, text=content["text"], timestamp=time.time_ns() // 1000)
        elif kind in ("display_data", "update_display_data", "execute_result"):
            self.put(**result(content["data"]), type="result", is_main_result=kind == "execute_result")
        elif kind == "error":
            self.put(type="error", name=content["ename"], value=content["evalue"], traceback="\n".join(content["traceback"]))
        elif kind == "execute_input":
            self.put(type="number_of_executions", execution_count=content["execution_count"])

    def gone(self):
        self.left = True
        self.wake.set()


def result(data):
    out = {FIELDS.get(k, k): v for k, v in data.items() if k not in TAKEN}
    text = out.get("text")
    # The wire has strings without the quotes of their representation.
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        out["text"] = text[1:-1]
    return out


class Context:
    """A kernel, and its executions one after the other."""

    def __init__(self, server, id, cwd):
        self.server, self.id, self.cwd = server, id, cwd
        self.lock = asyncio.Lock()  # held while code runs, and while the kernel starts
        self.current = None
        self.km = self.kc = self.reader = None
        self.closed = False
        self.envs = {}  # variables of the sandbox that the kernel has

    def describe(self):
        return {"id": self.id, "language": "python", "cwd": self.cwd}

    async def start(self):
        # Sockets of files: ports would be reachable through the gateway.
        self.km = AsyncKernelManager(
            kernel_name="python3", context=self.server.zmq, transport="ipc",
            connection_file=os.path.join(self.server.dir, uuid.uuid4().hex + ".json"),
        )
        try:
            self.envs = sandbox_env()
            await self.km.start_kernel(cwd=self.cwd, env={**os.environ, **self.envs, "PYDEVD_DISABLE_FILE_VALIDATION": "1"})
            self.kc = self.km.client()
            self.kc.start_channels(stdin=False, hb=False, control=False)
            await self.kc.wait_for_ready(timeout=START_TIME)
        except BaseException:
            await self.stop()
            raise
        self.reader = asyncio.create_task(self.read())

    async def stop(self):
        if self.reader:
            self.reader.cancel()
        if self.kc:
            self.kc.stop_channels()
        if self.km and self.km.has_kernel:
            await self.km.shutdown_kernel(now=True)
        if self.km:
            self.km.cleanup_connection_file()
            self.km.cleanup_ipc_files()
        self.km = self.kc = self.reader = None

    async def restart(self):
        """Replaces the kernel. Preconditions: nothing runs, the lock is held."""
        await self.stop()
        await self.start()

    async def read(self):
        while True:
            try:
                parts = await self.kc.iopub_channel.socket.recv_multipart()
                x = self.current
                size = sum(map(len, parts))
                if size > MAX_OUTPUT and x:
                    x.overflow()
                if size > (64 << 10 if x is None or x.over else MAX_OUTPUT):  # reading what is dropped takes seconds
                    continue
                msg = self.kc.session.deserialize(self.kc.session.feed_identities(parts)[1])
                if x and msg["parent_header"].get("msg_id") == x.msg_id:
                    x.message(msg)
            except (ValueError, KeyError, TypeError, AttributeError) as e:  # code can write to the kernel's sockets
                print("a message of the kernel is not understood:", repr(e), file=sys.stderr)

    async def alive(self):
        return self.km is not None and await self.km.is_alive()

    async def reply(self, msg_id):
        """Waits for the kernel's answer to a request."""
        while True:
            try:
                msg = await self.kc.get_shell_msg(timeout=1)
            except Exception as e:
                if type(e).__name__ != "Empty":
                    raise
                if not await self.alive():
                    raise Died() from None
                continue
            if msg["parent_header"].get("msg_id") == msg_id:
                return msg["content"]

    async def quietly(self, code):
        await asyncio.wait_for(self.reply(self.kc.execute(code, silent=True, store_history=False, allow_stdin=False)), GRACE)

    async def run(self, x, code, env):
        """Runs code. The lines of x are all there when it returns."""
        async with self.lock:
            if self.closed:
                x.put(type="error", name="ContextRemoved", value="the context was removed", traceback="")
                return
            if x.left:
                return
            try:
                if not await self.alive():
                    await self.restart()
                envs = sandbox_env()
                if envs != self.envs:
                    await self.quietly(CHANGE_ENV % ([k for k in self.envs if k not in envs], envs))
                    self.envs = envs
                if env:
                    await self.quietly(SET_ENV % env)
                await self.cell(x, code)
                if env and await self.alive():
                    await self.quietly(UNSET_ENV)
            except (Died, asyncio.TimeoutError):
                self.current = None
                x.put(type="error", name="KernelDied", value="the kernel has ended, and its state is lost", traceback="")
                try:
                    if not self.closed:
                        await self.restart()
                except Exception as e:  # the next execution tries again
                    print("no new kernel:", repr(e), file=sys.stderr)
            except Exception as e:
                print("an execution has failed:", repr(e), file=sys.stderr)
                x.put(type="error", name="KernelDied", value="the kernel does not start: " + str(e)[:1000], traceback="")
            finally:
                self.current = None

    async def cell(self, x, code):
        x.msg_id = self.kc.execute(code, allow_stdin=False, stop_on_error=False)
        self.current = x
        answer = asyncio.create_task(self.reply(x.msg_id))
        early = asyncio.create_task(x.wake.wait())
        try:
            await asyncio.wait({answer, early}, return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                # Again for code that catches the first; later and later, for a kernel that is busy with its end.
                for wait in INTERRUPTS:
                    if not answer.done() and await self.alive():
                        await self.km.interrupt_kernel()
                        await asyncio.wait({answer}, timeout=wait)
                if not answer.done():
                    raise Died()
            content = await answer
            try:
                await asyncio.wait_for(x.idle.wait(), GRACE)
            except asyncio.TimeoutError:
                pass  # the kernel's output was too fast for its socket
        finally:
            early.cancel()
            answer.cancel()
            self.current = None
        if any(p.get("source") == "ask_exit" for p in content.get("payload", [])):
            await self.restart()

    async def replace(self, close):
        """Ends what runs, and the kernel; starts another unless it is to be closed."""
        self.closed = self.closed or close
        if self.km and self.km.has_kernel:
            await self.km.signal_kernel(signal.SIGKILL)
        async with self.lock:
            await self.stop()
            if not self.closed:
                await self.start()


class Server:
    def __init__(self):
        self.zmq = zmq.asyncio.Context()
        self.zmq.rcvhwm = 0  # what a kernel prints is not lost while this process is busy
        self.dir = tempfile.mkdtemp(prefix="drowse-interpreter-")
        self.contexts = {}
        self.executions = 0
        self.creating = asyncio.Lock()

    async def create(self, id, cwd):
        async with self.creating:
            if id in self.contexts:
                return self.contexts[id]
            if len(self.contexts) >= MAX_CONTEXTS:
                raise tornado.web.HTTPError(429, reason="Too many contexts: at most %d" % MAX_CONTEXTS)
            c = Context(self, id, cwd)
            await c.start()
            self.contexts[id] = c
            return c

    async def default(self):
        return self.contexts.get(DEFAULT) or await self.create(DEFAULT, os.getcwd())


class Handler(tornado.web.RequestHandler):
    @property
    def server(self):
        return self.application.settings["server"]

    def write_error(self, status, **kw):
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        e = kw.get("exc_info", (None, None))[1]
        self.finish((getattr(e, "reason", None) or self._reason) + "\n")

    def body(self):
        try:
            body = json.loads(self.request.body or b"{}")
        except (ValueError, RecursionError):
            raise fail(400, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise fail(400, "the body is not an object")
        language = body.get("language")
        if language is not None and not (isinstance(language, str) and language.lower() in ("python", "python3")):
            raise fail(400, "language: only python is there")
        return body

    def context(self, id):
        c = self.server.contexts.get(id) if isinstance(id, str) else None
        if c is None:
            raise fail(404, "the context was not found")
        return c

    def answer(self, value):
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps(value))


def fail(status, reason):
    return tornado.web.HTTPError(status, reason=reason)


class Health(Handler):
    def get(self):
        self.finish("OK")


class Contexts(Handler):
    def get(self):
        self.answer([c.describe() for c in list(self.server.contexts.values())])

    async def post(self):
        body = self.body()
        cwd = body.get("cwd")
        if cwd is None:
            cwd = os.getcwd()
        if not isinstance(cwd, str) or "\0" in cwd or len(cwd) > 4096:
            raise fail(400, "cwd: not a path")
        try:
            cwd = os.path.abspath(os.path.expanduser(cwd))
            there = os.path.isdir(cwd)
        except ValueError:
            there = False
        if not there:
            raise fail(400, "cwd: there is no such directory")
        self.answer((await self.server.create(uuid.uuid4().hex, cwd)).describe())


class OneContext(Handler):
    async def delete(self, id):
        c = self.context(id)
        del self.server.contexts[id]
        await c.replace(close=True)
        self.set_status(204)
        self.finish()


class Restart(Handler):
    async def post(self, id):
        c = self.context(id)
        await c.replace(close=False)
        self.answer(c.describe())


class Execute(Handler):
    execution = None

    def on_connection_close(self):
        if self.execution:
            self.execution.gone()

    async def post(self):
        body = self.body()
        code, env = body.get("code"), body.get("env_vars") or {}
        if not isinstance(code, str):
            raise fail(400, "code: not a string")
        if len(code.encode("utf-8", "replace")) > MAX_CODE:
            raise fail(413, "code: at most %d bytes" % MAX_CODE)
        if not isinstance(env, dict) or len(env) > MAX_ENV or not all(variable(k, v) for k, v in env.items()):
            raise fail(400, "env_vars: at most %d strings by names of variables" % MAX_ENV)
        if body.get("context_id") and body.get("language"):
            raise fail(400, "only one of context_id and language")
        server = self.server
        if server.executions >= MAX_EXECUTIONS:
            raise fail(429, "Too many executions: at most %d" % MAX_EXECUTIONS)
        server.executions += 1
        try:
            x = self.execution = Execution()
            c = self.context(body["context_id"]) if body.get("context_id") else await server.default()
            self.set_header("Content-Type", "application/x-ndjson")
            await self.flush()
            job = asyncio.create_task(c.run(x, code, env))
            job.add_done_callback(lambda _: x.lines.put_nowait(None))
            try:
                while (line := await x.lines.get()) is not None:
                    self.write(line)
                    await self.flush()
                if x.over:
                    line = {"type": "error", "name": "OutputTooLarge", "traceback": "",
                            "value": "the output has more than %d bytes or %d messages" % (MAX_OUTPUT, MAX_MESSAGES)}
                    self.write(json.dumps(line) + "\n")
                self.finish()
            except tornado.iostream.StreamClosedError:
                x.gone()
            await job
        except tornado.iostream.StreamClosedError:
            pass
        finally:
            server.executions -= 1


def variable(k, v):
    return isinstance(v, str) and k and "=" not in k and "\0" not in k + v and len(k) + len(v) <= 128 << 10


async def main():
    server = Server()
    app = tornado.web.Application([
        (r"/health", Health), (r"/execute", Execute), (r"/contexts", Contexts),
        (r"/contexts/([0-9a-z]{1,64})", OneContext), (r"/contexts/([0-9a-z]{1,64})/restart", Restart),
    ], server=server, log_function=lambda _: None)
    # Before it listens: who reaches the port finds a kernel that runs.
    await server.default()
    app.listen(PORT, "127.0.0.1", max_body_size=MAX_BODY, max_buffer_size=2 * MAX_BODY, max_header_size=64 << 10)
    stop = asyncio.Event()
    for s in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(s, stop.set)
    await stop.wait()
    for c in list(server.contexts.values()):
        await c.replace(close=True)
    os.rmdir(server.dir)


if __name__ == "__main__":
    asyncio.run(main())
