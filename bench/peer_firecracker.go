package bench

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/drowse-vm/drowse/sandbox/spec"
)

const (
	firecrackerProgram = "firecracker"
	// fcPort is where the guest's process listens on its vsock.
	fcPort = 5000
	// fcGuest is the guest's address there; 0 to 2 are others'.
	fcGuest = 3
	// fcLook is how often to look for what nothing announces: the socket of the API, and a guest that takes
	// connections.
	fcLook = 200 * time.Microsecond
	// maxFCAnswer bounds an answer of the API, in bytes.
	maxFCAnswer = 64 << 10
)

// Names of files in the directory of a run. Firecracker starts there, so that its snapshot has no other path.
const (
	fcAPI   = "api"
	fcVsock = "vsock"
	fcUffd  = "uffd"
)

// firecracker is a guest of Firecracker with a snapshot.
type firecracker struct {
	peerGuest
	uffd bool // a handler in this process serves the memory by userfaultfd; otherwise Firecracker maps the file
}

func (f *firecracker) memory() string { return filepath.Join(f.dir, "memory") }

// newFirecracker boots a guest and takes a snapshot of it. The guest is that of newQEMU, but talks over vsock.
func (e Env) newFirecracker(ctx context.Context, mib, usedMiB int, uffd bool) (peer, error) {
	g, err := e.newPeerGuest(ctx, "Firecracker", firecrackerProgram, mib, usedMiB, fcWords(usedMiB))
	if err != nil {
		return nil, err
	}
	f := &firecracker{peerGuest: g, uffd: uffd}
	if err := f.save(ctx); err != nil {
		return nil, errors.Join(err, f.close())
	}
	return f, nil
}

// fcWords returns additions to the kernel's command line: what Firecracker expects there, and the guest's process.
// The process's words stand without "--", since Firecracker appends kernel parameters, which would go to the
// program after it. The kernel passes words that it does not know to the program.
func fcWords(usedMiB int) string {
	return fmt.Sprintf(" init_on_free=1 reboot=k panic=1 rdinit=/init --used %d --vsock %d", usedMiB, fcPort)
}

func (f *firecracker) params() map[string]any {
	return f.with(map[string]any{"peer_backend": f.backend()})
}

// backend is Firecracker's word for the source of a restored guest's memory.
func (f *firecracker) backend() string {
	if f.uffd {
		return "Uffd"
	}
	return "File"
}

// stateMiB is the size of both files on the disk. The memory file is as large as the RAM.
func (f *firecracker) stateMiB() float64 {
	var n int64
	for _, path := range []string{f.state(), f.memory()} {
		if info, err := os.Stat(path); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				n += 512 * st.Blocks
			}
		}
	}
	return float64(n) / mibBytes
}

// fcRun is a process of Firecracker. It counts as talking when its API takes connections.
type fcRun struct {
	*peerProcess
	api     *http.Client
	handler *fcHandler
}

// start starts Firecracker, and returns when its API answers.
func (f *firecracker) start(ctx context.Context, handle bool) (_ *fcRun, err error) {
	p, err := f.process("--api-sock", fcAPI, "--id", "drowse-bench")
	if err != nil {
		return nil, err
	}
	p.cmd.Dir = p.dir
	r := &fcRun{peerProcess: p}
	if handle {
		if r.handler, err = serveFaults(filepath.Join(r.dir, fcUffd), f.memory()); err != nil {
			return nil, errors.Join(err, os.RemoveAll(r.dir))
		}
	}
	r.api = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", filepath.Join(r.dir, fcAPI))
		},
	}}
	if err := r.peerProcess.start(); err != nil {
		if r.handler != nil {
			err = errors.Join(err, r.handler.close())
		}
		return nil, err
	}
	err = r.until(ctx, "its API", func() error {
		c, err := net.Dial("unix", filepath.Join(r.dir, fcAPI))
		if err == nil {
			c.Close()
		}
		return err
	})
	r.process = time.Since(r.begin)
	if err != nil {
		return nil, closed(r, err)
	}
	return r, nil
}

// until tries something until it succeeds, while Firecracker runs.
func (r *fcRun) until(ctx context.Context, what string, try func() error) error {
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-r.ended:
			return fmt.Errorf("waiting for %s: %w", what, err)
		case <-ctx.Done():
			return fmt.Errorf("waiting for %s: %w", what, errors.Join(ctx.Err(), err))
		case <-time.After(fcLook):
		}
	}
}

// do makes an API request (Firecracker's src/firecracker/swagger).
func (r *fcRun) do(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		text, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://localhost"+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := r.api.Do(req)
	if err != nil {
		return fmt.Errorf("asking Firecracker for %s: %w", path, err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxFCAnswer))
	if err != nil {
		return fmt.Errorf("asking Firecracker for %s: %w", path, err)
	}
	if resp.StatusCode/100 != 2 {
		return fmt.Errorf("asking Firecracker for %s: %s: %.500q", path, resp.Status, text)
	}
	if out != nil {
		if err := json.Unmarshal(text, out); err != nil {
			return fmt.Errorf("asking Firecracker for %s: %w", path, err)
		}
	}
	return nil
}

// connect connects to the guest's process, and waits for its first byte (Firecracker's docs/vsock.md).
func (r *fcRun) connect(ctx context.Context) error {
	return r.until(ctx, "the guest", func() (err error) {
		c, err := net.Dial("unix", filepath.Join(r.dir, fcVsock))
		if err != nil {
			return err
		}
		// Firecracker takes a connection even when the guest does not, and then ends it. A guest that has just
		// resumed may miss a request.
		stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
		defer func() {
			if !stop() || err != nil {
				c.Close()
				err = errors.Join(err, ctx.Err())
			}
		}()
		if _, err := fmt.Fprintf(c, "CONNECT %d\n", fcPort); err != nil {
			return err
		}
		in := bufio.NewReaderSize(c, 64)
		line, err := in.ReadSlice('\n')
		if err != nil {
			return fmt.Errorf("it says %q: %w", line, err)
		}
		if !strings.HasPrefix(string(line), "OK ") {
			return fmt.Errorf("it says %q", line)
		}
		b, err := in.ReadByte()
		if err == nil && b != PeerReady {
			err = fmt.Errorf("the guest says %q", b)
		}
		if err == nil {
			r.conn = c
		}
		return err
	})
}

// close kills Firecracker and returns when it and the handler have ended.
func (r *fcRun) close() error {
	return r.end(func() error {
		r.api.CloseIdleConnections()
		if r.handler != nil {
			return r.handler.close()
		}
		return nil
	})
}

// save boots the guest and takes a snapshot of it.
func (f *firecracker) save(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, peerBoot)
	defer cancel()
	r, err := f.start(ctx, false)
	if err != nil {
		return err
	}
	defer func() { err = closed(r, err) }()
	var version struct {
		Version string `json:"firecracker_version"`
	}
	if err := r.do(ctx, http.MethodGet, "/version", nil, &version); err != nil {
		return err
	}
	f.version = version.Version
	type object map[string]any
	for _, req := range []struct {
		path string
		body object
	}{
		{"/boot-source", object{"kernel_image_path": f.kernel, "initrd_path": f.initrd, "boot_args": f.cmdline}},
		{"/machine-config", object{"vcpu_count": spec.DefaultVCPUs, "mem_size_mib": f.mib}},
		{"/vsock", object{"guest_cid": fcGuest, "uds_path": fcVsock}},
		{"/actions", object{"action_type": "InstanceStart"}},
	} {
		if err := r.do(ctx, http.MethodPut, req.path, req.body, nil); err != nil {
			return err
		}
	}
	if err := r.connect(ctx); err != nil {
		return err
	}
	if err := r.ask(ctx, '?'); err != nil {
		return err
	}
	if err := r.do(ctx, http.MethodPatch, "/vm", object{"state": "Paused"}, nil); err != nil {
		return err
	}
	return r.do(ctx, http.MethodPut, "/snapshot/create", object{"snapshot_type": "Full", "snapshot_path": f.state(), "mem_file_path": f.memory()}, nil)
}

// resume starts Firecracker from the snapshot.
func (f *firecracker) resume(ctx context.Context) (total time.Duration, stages map[string]time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, peerAnswer)
	defer cancel()
	r, err := f.start(ctx, f.uffd)
	if err != nil {
		return 0, nil, err
	}
	backend := map[string]string{"backend_type": f.backend(), "backend_path": f.memory()}
	if f.uffd {
		backend["backend_path"] = fcUffd
	}
	err = r.do(ctx, http.MethodPut, "/snapshot/load", map[string]any{"snapshot_path": f.state(), "mem_backend": backend, "resume_vm": true}, nil)
	loaded := time.Now()
	if err == nil {
		err = r.connect(ctx)
	}
	if err == nil {
		err = r.ask(ctx, '!')
	}
	now := time.Now()
	if err != nil {
		return 0, nil, closed(r, err)
	}
	if err := r.close(); err != nil {
		return 0, nil, err
	}
	if r.handler != nil {
		// Check now that it has ended: an answer does not count if the handler failed.
		if err := r.handler.failed(); err != nil {
			return 0, nil, err
		}
	}
	return now.Sub(r.begin), r.stages(loaded, now), nil
}
