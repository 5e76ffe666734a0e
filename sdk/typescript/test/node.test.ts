// Copies of directories: against the server that sdk/sdktest starts, and from archives that a hostile sandbox could send.
import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { existsSync, lstatSync, mkdirSync, mkdtempSync, readFileSync, readdirSync, readlinkSync, rmSync, symlinkSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, describe, it } from "node:test";
import { Drowse, type Sandbox } from "drowse";
import { downloadDirectory, uploadDirectory } from "drowse/node";

const url = process.env["DROWSE_URL"] ?? "";
const root = mkdtempSync(join(tmpdir(), "drowse-node-"));
after(() => rmSync(root, { recursive: true, force: true }));
const fresh = (name: string) => {
  const dir = join(root, name);
  mkdirSync(dir);
  return dir;
};

/** A sandbox whose directory is an archive. pieces cuts it. */
const sends = (tar: Uint8Array, pieces = 700) =>
  ({
    files: {
      downloadTree: async () =>
        new ReadableStream<Uint8Array>({
          start(c) {
            for (let i = 0; i < tar.length; i += pieces) c.enqueue(tar.subarray(i, i + pieces));
            c.close();
          },
        }),
    },
  }) as unknown as Sandbox;

/** A sandbox that keeps the archive that it gets. */
const keeps = () => {
  const parts: Uint8Array[] = [];
  const files = {
    uploadTree: async (_: string, tar: ReadableStream<Uint8Array>) => {
      for await (const p of tar as unknown as AsyncIterable<Uint8Array>) parts.push(p);
      return parts.length;
    },
  };
  return { box: { files } as unknown as Sandbox, tar: () => Buffer.concat(parts) };
};

const tree = (dir: string, below = ""): string[] =>
  readdirSync(join(dir, below)).sort().flatMap((name) => {
    const at = join(below, name), st = lstatSync(join(dir, at)), mode = (st.mode & 0o777).toString(8);
    if (st.isSymbolicLink()) return [`${at} -> ${readlinkSync(join(dir, at))}`];
    return st.isDirectory() ? [`${at}/ ${mode}`, ...tree(dir, at)] : [`${at} ${mode} ${readFileSync(join(dir, at)).toString("hex").slice(0, 40)} ${st.size}`];
  });

function sample(name: string) {
  const dir = fresh(name);
  mkdirSync(join(dir, "d", "empty"), { recursive: true });
  writeFileSync(join(dir, "run.sh"), "#!/bin/sh\n", { mode: 0o755 });
  writeFileSync(join(dir, "none"), "");
  writeFileSync(join(dir, "d", "ä ü 漢.txt"), "n");
  writeFileSync(join(dir, "d", "l".repeat(200)), "long");
  writeFileSync(join(dir, "d", "big"), Buffer.alloc(70_001, "0123456789"));
  symlinkSync("d/big", join(dir, "link"));
  symlinkSync("../run.sh", join(dir, "d", "up"));
  return dir;
}

describe("copies of directories", () => {
  it("are what tar(1) reads and writes", async () => {
    const from = sample("from"), out = keeps();
    await uploadDirectory(out.box, from, "/x");
    const to = fresh("by-tar");
    execFileSync("tar", ["-C", to, "-xf", "-"], { input: out.tar() });
    assert.deepEqual(tree(to), tree(from));
    for (const format of ["ustar", "pax"]) {
      const skipped = format === "ustar" ? ["--exclude", "l".repeat(200), "--exclude", "*漢*"] : [];
      const tar = execFileSync("tar", ["-C", from, "--format", format, ...skipped, "-cf", "-", "."], { maxBuffer: 64 << 20 });
      for (const pieces of [97, 511, 1 << 20]) {
        const got = fresh(`${format}-${pieces}`);
        await downloadDirectory(sends(tar, pieces), "/x", got);
        assert.deepEqual(tree(got), tree(from).filter((line) => format === "pax" || !(line.includes("lll") || line.includes("漢"))));
        await downloadDirectory(sends(tar, pieces), "/x", got); // over what is there
      }
    }
  });

  it("stay in their directory", async () => {
    const outside = fresh("outside");
    const evil = (change: (dir: string) => string[]) => {
      const dir = fresh("evil-" + Math.random());
      return execFileSync("tar", ["-C", dir, "-P", ...change(dir), "-cf", "-", "."], { stdio: ["ignore", "pipe", "ignore"] });
    };
    const renamed = (to: string) => evil((dir) => (writeFileSync(join(dir, "x"), "evil"), ["--transform", `s|^\\./x|${to}|`]));
    for (const [what, tar] of [["a name above", renamed("../outside/x")], ["an absolute name", renamed(join(outside, "x"))], ["one that turns", renamed("a/../../outside/x")]] as const) {
      const to = fresh("to-" + what);
      await assert.rejects(downloadDirectory(sends(tar), "/x", to), /outside/, what);
      assert.deepEqual(readdirSync(to), [], what);
    }
    // Links that lead outside are left out, and nothing is written through one that is there.
    const links = evil((dir) => (symlinkSync(outside, join(dir, "abs")), symlinkSync("../outside", join(dir, "rel")), symlinkSync("./ok", join(dir, "in")), []));
    const to = fresh("links");
    await downloadDirectory(sends(links), "/x", to);
    assert.deepEqual(readdirSync(to), ["in"]);
    symlinkSync(outside, join(to, "d"));
    const through = evil((dir) => (mkdirSync(join(dir, "d")), writeFileSync(join(dir, "d", "x"), "evil"), []));
    await assert.rejects(downloadDirectory(sends(through), "/x", to), /nothing is written through it/);
    symlinkSync(join(outside, "y"), join(to, "y"));
    await downloadDirectory(sends(evil((dir) => (writeFileSync(join(dir, "y"), "mine"), []))), "/x", to);
    assert.ok(lstatSync(join(to, "y")).isFile());
    assert.deepEqual(readdirSync(outside), []);
    assert.ok(!existsSync(join(root, "x")));
  });

  it("are errors unless they are whole", async () => {
    const tar = execFileSync("tar", ["-C", sample("cut"), "-cf", "-", "."], { maxBuffer: 64 << 20 });
    for (const [what, bad] of [["cut", tar.subarray(0, 30_000)], ["cut at a header", tar.subarray(0, 512)], ["none", Buffer.from("x".repeat(1024))]] as const) {
      await assert.rejects(downloadDirectory(sends(bad), "/x", fresh("bad-" + what)), Error, what);
    }
  });

  it("go there and back", { skip: url ? false : "there is no server: make test-sdk" }, async () => {
    const box = await new Drowse({ url }).create({ image: "test" });
    try {
      const from = fresh("there");
      mkdirSync(join(from, "sub"));
      writeFileSync(join(from, "sub", "a"), "a");
      writeFileSync(join(from, "big"), Buffer.alloc(400_001, "x"));
      await box.files.mkdir("/up");
      assert.ok((await uploadDirectory(box, from, "/up")) > 0);
      assert.equal(await box.files.readText("/up/sub/a"), "a");
      const to = join(root, "back");
      await downloadDirectory(box, "/up", to);
      assert.deepEqual(tree(to).map((l) => l.split(" ")[0]), ["up/", "up/big", "up/sub/", "up/sub/a"]);
      assert.equal(readFileSync(join(to, "up", "big")).length, 400_001);
    } finally {
      await box.delete();
    }
  });
});
