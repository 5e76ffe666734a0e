package bench

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// fakeFCEnv makes the test binary answer as Firecracker does, or fail as its value says.
const fakeFCEnv = "DROWSE_BENCH_FIRECRACKER"

const fakeFCPages = 300 // the guest's memory, in pages

// fakeMemory returns the content of a page of the guest.
func fakeMemory(page int) []byte {
	sum := sha256.Sum256([]byte{byte(page), byte(page >> 8)})
	p := make([]byte, 4096)
	for at := 0; at < len(p); at += len(sum) {
		copy(p[at:], sum[:])
	}
	return p
}

// fakeFirecracker runs in place of Firecracker. Like Firecracker, it answers a request that does not match the
// documentation with an error.
func fakeFirecracker(how string, args []string) error {
	fmt.Println("this is no Firecracker")
	if how == "dies" {
		return errors.New("cannot do that")
	}
	if len(args) != 4 || args[0] != "--api-sock" || args[2] != "--id" {
		return fmt.Errorf("arguments %q", args)
	}
	var booted, paused bool
	var vsock string
	asked := map[string]map[string]any{}
	serveVsock := func(path string) error {
		l, err := net.Listen("unix", path)
		if err != nil {
			return err
		}
		go func() {
			for n := 0; ; n++ {
				c, err := l.Accept()
				if err != nil {
					return
				}
				if n < 3 { // as if the guest did not listen yet
					c.Close()
					continue
				}
				go func() {
					defer c.Close()
					in := bufio.NewReader(c)
					line, _ := in.ReadString('\n')
					if line != "CONNECT 5000\n" {
						return
					}
					fmt.Fprintf(c, "OK 1073741824\n%c", PeerReady)
					_, _ = io.Copy(c, in)
				}()
			}
		}()
		return nil
	}
	act := func(method, path string, in map[string]any) error {
		str := func(key string) string { s, _ := in[key].(string); return s }
		asked[path] = in
		switch method + " " + path {
		case "PUT /boot-source":
			if str("kernel_image_path") != "/kernel/vmlinux" || !strings.HasSuffix(str("boot_args"), " rdinit=/init --used 7 --vsock 5000") {
				return fmt.Errorf("boot source %v", in)
			}
			_, err := os.Stat(str("initrd_path"))
			return err
		case "PUT /machine-config":
			if in["vcpu_count"] != 1.0 || in["mem_size_mib"] != 128.0 {
				return fmt.Errorf("machine config %v", in)
			}
		case "PUT /vsock":
			if cid, _ := in["guest_cid"].(float64); cid < 3 || str("uds_path") == "" {
				return fmt.Errorf("vsock %v", in)
			}
			vsock = str("uds_path")
		case "PUT /actions":
			if booted || str("action_type") != "InstanceStart" || asked["/boot-source"] == nil || asked["/machine-config"] == nil || vsock == "" {
				return fmt.Errorf("action %v", in)
			}
			booted = true
			return serveVsock(vsock)
		case "PATCH /vm":
			if !booted || str("state") != "Paused" {
				return fmt.Errorf("state %v", in)
			}
			paused = true
		case "PUT /snapshot/create":
			if how == "refuses" {
				return errors.New("snapshots are not for this CPU")
			}
			if !paused || str("snapshot_type") != "Full" {
				return fmt.Errorf("snapshot %v", in)
			}
			var memory []byte
			for i := range fakeFCPages {
				memory = append(memory, fakeMemory(i)...)
			}
			return errors.Join(os.WriteFile(str("mem_file_path"), memory, 0o600), os.WriteFile(str("snapshot_path"), []byte(vsock), 0o600))
		case "PUT /snapshot/load":
			state, err := os.ReadFile(str("snapshot_path"))
			if err != nil || in["resume_vm"] != true {
				return fmt.Errorf("snapshot to load %v: %w", in, err)
			}
			backend, _ := in["mem_backend"].(map[string]any)
			at, _ := backend["backend_path"].(string)
			switch backend["backend_type"] {
			case "File":
				if info, err := os.Stat(at); err != nil || info.Size() != fakeFCPages*4096 {
					return fmt.Errorf("memory %v: %w", info, err)
				}
			case "Uffd":
				if err := fakeUffdGuest(at, how); err != nil {
					return err
				}
			default:
				return fmt.Errorf("backend %v", backend)
			}
			return serveVsock(string(state))
		default:
			return fmt.Errorf("%s %s", method, path)
		}
		return nil
	}
	l, err := net.Listen("unix", args[1])
	if err != nil {
		return err
	}
	return http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && r.URL.Path == "/version" {
			fmt.Fprintln(w, `{"firecracker_version": "1.99.0"}`)
			return
		}
		var in map[string]any
		err := json.NewDecoder(r.Body).Decode(&in)
		if err == nil {
			err = act(r.Method, r.URL.Path, in)
		}
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			_ = json.NewEncoder(w).Encode(map[string]string{"fault_message": err.Error()})
			return
		}
		w.WriteHeader(http.StatusNoContent)
	}))
}

// fakeUffdGuest gets its memory from a fault handler, and checks all of it.
func fakeUffdGuest(socket, how string) error {
	uffd, memory, base, err := missedMemory(fakeFCPages * 4096)
	if err != nil {
		return err
	}
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return err
	}
	// Two regions, like those above and below the hole, the later one first.
	half := uint64(fakeFCPages / 2 * 4096)
	regions := []fcRegion{
		{Base: base + half, Size: uint64(len(memory)) - half, Offset: half, PageSize: 4096, PageKiB: 4096},
		{Base: base, Size: half, PageKiB: 4096},
	}
	text, err := json.Marshal(regions)
	if err != nil {
		return err
	}
	if how == "bad" {
		text = []byte("[]")
	}
	if _, _, err := c.WriteMsgUnix(text, unix.UnixRights(uffd), nil); err != nil {
		return err
	}
	if how != "" {
		return nil // the handler will provide no memory
	}
	for i := range fakeFCPages {
		at := (i * 37 % fakeFCPages) * 4096
		if want := fakeMemory(at / 4096); string(memory[at:at+4096]) != string(want) {
			return fmt.Errorf("page %d is not what was saved", at/4096)
		}
	}
	return nil
}

// saveFake saves a guest with the test binary in place of Firecracker.
func saveFake(t *testing.T, how string, uffd bool) (*beside, error) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	script := fmt.Sprintf("#!/bin/sh\n%s='%s' exec '%s' \"$@\"\n", fakeFCEnv, how, self)
	if err := os.WriteFile(filepath.Join(dir, firecrackerProgram), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	f := &firecracker{peerGuest{
		monitor: "Firecracker", dir: t.TempDir(), path: filepath.Join(dir, firecrackerProgram), mib: 128, usedMiB: 7, kernel: "/kernel/vmlinux", initrd: self,
		cmdline: "console=ttyS0" + fcWords(7),
	}, uffd}
	name := peerFirecracker
	if uffd {
		name = peerFirecrackerUffd
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	return &beside{name: name, mib: 128, peer: f, runs: newSeries(inMs), whole: newSeries(inRatio), bare: newSeries(inRatio)}, f.save(ctx)
}

func TestFirecracker_is_resumed_from_its_snapshot(t *testing.T) {
	for _, name := range []string{peerFirecracker, peerFirecrackerUffd} {
		t.Run(name, func(t *testing.T) {
			if name == peerFirecrackerUffd && os.Geteuid() != 0 {
				t.Skip("userfaultfd needs root")
			}
			b, err := saveFake(t, "ok", name == peerFirecrackerUffd)
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			for range 3 {
				if err := b.resume(ctx, true, 1); err != nil {
					t.Fatal(err)
				}
			}
			rows := b.rows("resume_ready")
			if len(rows) != 3 || rows[0].N != 3 || rows[0].Params["peer"] != name || rows[0].Params["peer_version"] != "1.99.0" || rows[0].Params[paramUsed] != 7 || rows[0].StateMiB < 1 {
				t.Errorf("why %q; %+v", b.why, rows)
			}
			for _, stage := range []string{"process", "load", "answer"} {
				if rows[0].Stages[stage] <= 0 {
					t.Errorf("stages %v", rows[0].Stages)
				}
			}
			dir := b.peer.(*firecracker).dir
			if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
				t.Errorf("beside the snapshot there are %v, %v", left, err)
			}
			if err := b.close(); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", dir, err)
			}
		})
	}
}

func TestFirecracker_that_cannot_gives_its_words(t *testing.T) {
	for how, want := range map[string]string{"dies": "cannot do that", "refuses": "snapshots are not for this CPU"} {
		b, err := saveFake(t, how, false)
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "this is no Firecracker") {
			t.Errorf("%s: %v, want %q", how, err, want)
		}
		if left, err := os.ReadDir(b.peer.(*firecracker).dir); err != nil || len(left) != 0 {
			t.Errorf("%s has left %v, %v", how, left, err)
		}
	}
}

func TestFirecracker_memory_that_is_not_understood_is_told_of(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("userfaultfd needs root")
	}
	b, err := saveFake(t, "bad", true)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.resume(t.Context(), true, 1); err != nil || !strings.Contains(b.why, "0 regions") {
		t.Errorf("%v, %q", err, b.why)
	}
	if err := b.close(); err != nil {
		t.Error(err)
	}
}

func TestFaultHandler_page_that_is_nowhere_is_refused(t *testing.T) {
	h := &fcHandler{memory: make([]byte, 2*4096)}
	regions := []fcRegion{{Base: 0x10000, Size: 0x4000, PageSize: 4096}, {Base: 0x20000, Size: 0x1000, Offset: ^uint64(0) - 100, PageSize: 4096}}
	for name, addr := range map[string]uint64{"no region": 0x9000, "behind the file": 0x12000, "offset that overflows": 0x20000} {
		if err := h.fill(-1, regions, addr); err == nil {
			t.Errorf("%s: it was filled", name)
		}
	}
}

func TestFaultHandler_that_nobody_uses_ends(t *testing.T) {
	dir := t.TempDir()
	memory := filepath.Join(dir, "memory")
	if err := os.WriteFile(memory, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, dial := range map[string]bool{"nobody connects": false, "nothing is said": true} {
		socket := filepath.Join(dir, fmt.Sprint(dial))
		h, err := serveFaults(socket, memory)
		if err != nil {
			t.Fatal(err)
		}
		if dial {
			c, err := net.Dial("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
		if err := h.close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := serveFaults(filepath.Join(dir, "s"), filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a file: %v", err)
	}
}
