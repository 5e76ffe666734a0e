package sandbox_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/guest"
	"github.com/drowse-vm/drowse/guest/audit"
	"github.com/drowse-vm/drowse/internal/test/guesttest"
	"github.com/drowse-vm/drowse/sandbox"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm/guestmem"
)

// user reads a secret when asked, answers with a hash of it, and wipes its copy. It keeps a control string in
// memory.
const user = `
import os
control = open('/root/control', 'rb').read()
while True:
    open('/run/user.ask').read()
    b = bytearray(4096)
    h = 7
    try:
        fd = os.open('/run/secrets/token', os.O_RDONLY)
        n = os.readv(fd, [b])
        os.close(fd)
        for i in range(n):
            h = (h * 131 + b[i]) % 1000000007
            b[i] = 0
    except OSError as e:
        h = e.strerror
    with open('/run/user.answer', 'w') as f:
        f.write('%d %s\n' % (os.getpid(), h))
`

// number returns the hash of a secret that user computes.
func number(secret string) string {
	h := 7
	for _, c := range []byte(secret) {
		h = (h*131 + int(c)) % 1000000007
	}
	return fmt.Sprint(h)
}

func randomText(t *testing.T, prefix string) string {
	t.Helper()
	b := make([]byte, 24)
	if _, err := rand.Read(b); err != nil {
		t.Fatal(err)
	}
	return prefix + hex.EncodeToString(b)
}

// copies counts a text in a snapshot: in its memory, decompressed, and in the states of its devices. Sixteen bytes
// in a row of the text count as a copy.
func copies(t *testing.T, dir, text string) (memory, states int) {
	t.Helper()
	s, err := snapshot.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, p := range s.Payloads() {
		states += count(p.Data, text)
	}
	d, err := snapshot.NewDecoder()
	if err != nil {
		t.Fatal(err)
	}
	defer d.Release()
	// The search covers the end of the previous page again, for copies across two pages.
	const overlap = piece - 1
	buf := make([]byte, overlap+guestmem.PageSize)
	for page := range s.Memory().Pages() {
		if err := s.Memory().ReadPage(page, buf[overlap:], d); err != nil {
			t.Fatal(err)
		}
		memory += count(buf, text)
		copy(buf, buf[guestmem.PageSize:])
	}
	return memory, states
}

const piece = 16

func count(data []byte, text string) (n int) {
	for i := 0; i+piece <= len(text); i += piece {
		n += bytes.Count(data, []byte(text[i:i+piece]))
	}
	return n
}

// inFiles counts a text in the files of a store, which it does not decompress.
func inFiles(t *testing.T, s *sandbox.Host, text string) (n int) {
	t.Helper()
	for _, sub := range []string{"vms", "snapshots", "layers"} {
		err := filepath.WalkDir(filepath.Join(s.State.Dir(), sub), func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			k, err := inFile(path, text)
			n += k
			return err
		})
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Fatal(err)
		}
	}
	return n
}

// inFile counts a text in one file. It skips holes, since a layer of a disk is large and sparse.
func inFile(path, text string) (n int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	const overlap, room = piece - 1, 1 << 20
	buf := make([]byte, overlap+room)
	for at := int64(0); ; {
		data, err := f.Seek(at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return n, nil // only a hole is left
		}
		if err != nil {
			return n, err
		}
		if data > at {
			clear(buf[:overlap])
		}
		k, err := f.Read(buf[overlap:])
		n += count(buf[:overlap+k], text)
		copy(buf, buf[k:k+overlap])
		at = data + int64(k)
		if err != nil && !errors.Is(err, io.EOF) {
			return n, err
		}
	}
}

func TestSecrets_are_in_no_snapshot(t *testing.T) {
	t.Parallel()
	e, snapshotOfBase, _ := base(t)
	clone(e, snapshotOfBase, "sec")
	ask := func(e *guesttest.Env, vm string) string {
		t.Helper()
		return order(e, vm, "", "/run/user.ask", "/run/user.answer")
	}
	control := randomText(t, "control-")
	c := e.Agent("sec")
	for path, text := range map[string]string{"/root/control": strings.Repeat(control+"\n", 200), "/root/user.py": user} {
		if err := c.WriteFile(t.Context(), path, strings.NewReader(text), guest.WriteOptions{Atomic: true}); err != nil {
			t.Fatal(err)
		}
	}
	e.Do("sec", "mkfifo", "/run/user.ask", "/run/user.answer")
	secret := randomText(t, "secret-")
	set := func(vm, value string) {
		t.Helper()
		token := spec.Secret{SecretFile: spec.SecretFile{Name: "token"}, Value: []byte(value)}
		if err := e.Store.Sandbox(vm).SetSecrets(t.Context(), token); err != nil {
			t.Fatal(err)
		}
	}
	set("sec", secret)
	p, err := c.Start(t.Context(), guest.Cmd{Argv: []string{"python3", "-S", "-E", "/root/user.py"}, Detach: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	first := ask(e, "sec")
	if !strings.HasSuffix(first, " "+number(secret)) {
		t.Fatalf("the program says %q of its secret, want %s", first, number(secret))
	}
	// search looks for the secret everywhere, and for the control string, which proves that the search works.
	search := func(what, snap string) {
		t.Helper()
		memory, states := copies(t, filepath.Join(e.Store.State.Dir(), "snapshots", snap), secret)
		if files := inFiles(t, e.Store, secret); memory+states+files > 0 {
			t.Errorf("%s: the secret is %d times in memory, %d in states of devices, %d in files", what, memory, states, files)
		}
		seen, _ := copies(t, filepath.Join(e.Store.State.Dir(), "snapshots", snap), control)
		if files := inFiles(t, e.Store, control); seen == 0 || files == 0 {
			t.Errorf("%s: the control string is %d times in memory, %d in files: the search does not work", what, seen, files)
		}
	}

	snap, err := e.Store.Sandbox("sec").Snapshot(t.Context(), sandbox.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	search("a snapshot of the running VM", snap.Snapshot)
	clone(e, snap.Snapshot, "c")
	if got := ask(e, "c"); !strings.HasSuffix(got, " No such file or directory") {
		t.Errorf("a clone says %q of the secret", got)
	}
	if list, err := e.Store.Sandbox("c").Secrets(t.Context()); err != nil || len(list) != 0 {
		t.Errorf("a clone has %v, %v", list, err)
	}
	forks(e, "sec", sandbox.ForkOptions{Count: 1, Name: "f"})
	if got := ask(e, "f"); !strings.HasSuffix(got, " No such file or directory") {
		t.Errorf("a fork says %q of the secret", got)
	}
	// The fork can get its own secret.
	set("f", "other")
	if got := ask(e, "f"); !strings.HasSuffix(got, " "+number("other")) {
		t.Errorf("a fork with a secret of its own says %q", got)
	}
	if got := ask(e, "sec"); got != first {
		t.Errorf("after the fork the program says %q, before %q", got, first)
	}

	res := e.Sleep("sec")
	search("a sleep", res.Snapshot)
	list, err := e.Store.Sandbox("sec").Secrets(t.Context())
	if err != nil || len(list) != 1 || list[0].Name != "token" || list[0].Present || !list[0].Kept {
		t.Errorf("a VM that sleeps waits for %+v, %v", list, err)
	}
	if err := e.Store.Sandbox("sec").SetSecrets(t.Context(), spec.Secret{SecretFile: spec.SecretFile{Name: "token"}}); !errors.Is(err, sandbox.ErrNotRunning) {
		t.Errorf("a secret for a VM that sleeps: %v, want ErrNotRunning", err)
	}

	// The program asks for the secret before the VM has it again, and gets it.
	e.Wake("sec")
	asking := e.Agent("sec")
	said := make(chan string, 1)
	go func() {
		var out bytes.Buffer
		err := asking.WriteFile(t.Context(), "/run/user.ask", strings.NewReader("\n"), guest.WriteOptions{})
		if err == nil {
			_, err = asking.ReadFile(t.Context(), "/run/user.answer", &out, 0, 0)
		}
		if err != nil {
			out.WriteString(err.Error())
		}
		said <- strings.TrimSpace(out.String())
	}()
	set("sec", secret)
	if got := <-said; got != first {
		t.Errorf("after the wake the program says %q, before the sleep %q", got, first)
	}
	search("a second sleep", e.Sleep("sec").Snapshot)

	// A wake can ask its caller for the secret.
	l := e.Launcher
	l.Secrets = func(_ context.Context, vm string, awaited []spec.SecretFile) ([]spec.Secret, error) {
		if vm != "sec" || len(awaited) != 1 || awaited[0].Name != "token" {
			t.Errorf("asked for %v of %s", awaited, vm)
		}
		return []spec.Secret{{SecretFile: awaited[0], Value: []byte(secret)}}, nil
	}
	if _, err := e.Store.With(l).Sandbox("sec").Wake(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := ask(e, "sec"); got != first {
		t.Errorf("after the second wake the program says %q, before %q", got, first)
	}
	if err := e.Store.Sandbox("sec").RemoveSecrets(t.Context(), "token"); err != nil {
		t.Fatal(err)
	}
	if err := e.Store.Sandbox("sec").RemoveSecrets(t.Context(), "token"); !errors.Is(err, sandbox.ErrNotFound) {
		t.Errorf("removing it twice: %v, want ErrNotFound", err)
	}
	if got := ask(e, "sec"); !strings.HasSuffix(got, " No such file or directory") {
		t.Errorf("the program says %q of a secret that was removed", got)
	}

	kinds := map[audit.Kind]int{}
	if _, err := e.Store.State.Audit(t.Context(), "sec", audit.ReadOptions{}, func(en audit.Entry) error {
		if en.Path == guest.SecretsDir+"/token" {
			kinds[en.Kind]++
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if kinds[audit.KindSecretSet] != 3 || kinds[audit.KindSecretRemove] != 2 {
		t.Errorf("the audit trail has %v", kinds)
	}
}
