package jail

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/snapshot"
)

// zeros is RAM without data.
type zeros struct{ bytes uint64 }

func (z zeros) Slots() []snapshot.Slot                     { return []snapshot.Slot{{Size: z.bytes}} }
func (zeros) NextData(page uint64) (uint64, uint64, error) { return page, page, nil }
func (zeros) ReadPages(_ uint64, p []byte) error           { clear(p); return nil }

// write writes the snapshot that the store's capture has ordered, as a child does it, but for what forge changes.
func (s *store) write(ctx context.Context, forge func(*snapshot.Spec)) error {
	v := s.v
	p, c := v.parts.Spec, v.capture
	sp := snapshot.Spec{
		ID: c.o.ID, Sandbox: p.Name, VCPUs: p.VCPUs, Image: c.o.Image, Kernel: c.o.Kernel, Labels: c.o.Labels,
		Disks:  []snapshot.Disk{{Name: instance.DeviceDisk, Size: uint64(v.started.DiskSize), Layers: c.names}},
		Memory: zeros{p.Memory()}, FS: &passedFS{ask: s.ask},
	}
	if forge != nil {
		forge(&sp)
	}
	_, err := snapshot.Create(ctx, s.final, sp)
	return err
}

func TestA_snapshot_that_differs_from_what_was_ordered_gets_no_name(t *testing.T) {
	for name, forge := range map[string]func(*snapshot.Spec){
		"id":          func(s *snapshot.Spec) { s.ID = otherID },
		"name":        func(s *snapshot.Spec) { s.Sandbox = "other" },
		"image":       func(s *snapshot.Spec) { s.Image = "other" },
		"no image":    func(s *snapshot.Spec) { s.Image = "" },
		"kernel":      func(s *snapshot.Spec) { s.Kernel = "other" },
		"vCPUs":       func(s *snapshot.Spec) { s.VCPUs++ },
		"RAM":         func(s *snapshot.Spec) { s.Memory = zeros{s.Memory.(zeros).bytes * 2} },
		"no labels":   func(s *snapshot.Spec) { s.Labels = nil },
		"more labels": func(s *snapshot.Spec) { s.Labels = map[string]string{"a": "b", "keep": "yes"} },
		"label":       func(s *snapshot.Spec) { s.Labels = map[string]string{"a": "c"} },
		"its key":     func(s *snapshot.Spec) { s.Labels = map[string]string{"b": "b"} },
		"no disk":     func(s *snapshot.Spec) { s.Disks = nil },
		"two disks":   func(s *snapshot.Spec) { s.Disks = append(s.Disks, s.Disks[0]) },
		"disk's name": func(s *snapshot.Spec) { s.Disks[0].Name = "other" },
		"disk's size": func(s *snapshot.Spec) { s.Disks[0].Size++ },
		"layers":      func(s *snapshot.Spec) { s.Disks[0].Layers = []string{"layers/" + otherID + "-0"} },
		"one layer more": func(s *snapshot.Spec) {
			s.Disks[0].Layers = append(slices.Clone(s.Disks[0].Layers), "layers/"+otherID+"-0")
		},
		"order of layers": func(s *snapshot.Spec) {
			s.Disks[0].Layers = slices.Clone(s.Disks[0].Layers)
			slices.Reverse(s.Disks[0].Layers)
		},
		"too large": func(s *snapshot.Spec) {
			s.Payloads = []snapshot.Payload{{Name: "a", Kind: "b", Data: make([]byte, snapshot.MaxPayloadBytes)}}
			s.ID = otherID
		},
	} {
		t.Run(name, func(t *testing.T) {
			sameFDs(t)
			s := newStore(t)
			c := s.begin(t, s.options(), false)
			s.seal(t, c)
			before := s.tree(t)
			if err := s.write(t.Context(), forge); !errors.Is(err, errForged) {
				t.Errorf("it ended with %v", err)
			}
			s.v.endCapture(c)
			if c.manifest != nil {
				t.Error("the keeper believes in the snapshot")
			}
			for _, dir := range []string{s.final, s.temp} {
				if _, err := os.Lstat(dir); err == nil {
					t.Errorf("%s is there", dir)
				}
			}
			s.unchanged(t, before)
		})
	}
}

// draft opens the manifest of a sealed capture, whose memory has been written.
func (s *store) draft(t *testing.T, c *capture) *os.File {
	t.Helper()
	s.seal(t, c)
	s.must(t, fileOrder{Op: fileMkdir, Name: s.temp})
	s.must(t, fileOrder{Op: fileOpen, Name: s.temp + "/memory", Flags: snapshotFlags})
	_, files, err := s.ask(fileOrder{Op: fileOpen, Name: s.temp + "/manifest", Flags: snapshotFlags})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { files[0].Close() })
	return files[0]
}

func (s *store) commit() error {
	_, _, err := s.ask(fileOrder{Op: fileRenameNew, Name: s.temp, To: s.final})
	return err
}

// relative has the names of layers be the same in all stores.
func relative(o instance.CaptureOptions) instance.CaptureOptions {
	o.Names = func(st disk.Stack) (out []string) {
		for _, l := range st.Layers {
			out = append(out, "layers/"+filepath.Base(l))
		}
		return out
	}
	return o
}

// manifest returns that of a snapshot of relative layers.
func manifest(t *testing.T) []byte {
	t.Helper()
	s := newStore(t)
	s.seal(t, s.begin(t, relative(s.options()), false))
	if err := s.write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	body, err := os.ReadFile(s.final + "/manifest")
	if err != nil {
		t.Fatal(err)
	}
	return body
}

// resum replaces a text of a manifest with another of the same length.
func resum(t *testing.T, body []byte, old, new string) []byte {
	t.Helper()
	if len(old) != len(new) || !bytes.Contains(body, []byte(old)) {
		t.Fatalf("%q does not fit in place of %q", new, old)
	}
	body = bytes.Replace(bytes.Clone(body), []byte(old), []byte(new), 1)
	end := len(body) - sha256.Size
	sum := sha256.Sum256(body[:end])
	return append(body[:end:end], sum[:]...)
}

func TestA_manifest_names_no_files_elsewhere(t *testing.T) {
	body := manifest(t)
	for _, name := range []string{"../../", "/etc/x", "a\\u00/", "memor/", "."} {
		s := newStore(t)
		f := s.draft(t, s.begin(t, relative(s.options()), false))
		if len(name) < 6 {
			name += strings.Repeat("/", 6-len(name))
		}
		if _, err := f.Write(resum(t, body, `"name":"memory"`, `"name":"`+name[:6]+`"`)); err != nil {
			t.Fatal(err)
		}
		if err := s.commit(); err == nil {
			t.Errorf("a memory file may be called %s", name)
		}
	}
}

func TestA_snapshot_whose_memory_is_not_what_its_manifest_says_cannot_be_opened(t *testing.T) {
	body := manifest(t)
	s := newStore(t)
	f := s.draft(t, s.begin(t, relative(s.options()), false))
	if _, err := f.Write(body); err != nil {
		t.Fatal(err)
	}
	if err := s.commit(); err != nil { // the memory is empty, and the keeper does not read it
		t.Fatal(err)
	}
	if sn, err := snapshot.Open(s.final); err == nil {
		sn.Close()
		t.Error("it opens")
	}
}

func TestA_manifest_that_is_written_after_its_snapshot_is_finished_changes_nothing_on_disk(t *testing.T) {
	body := manifest(t)
	s := newStore(t)
	f := s.draft(t, s.begin(t, relative(s.options()), false))
	if _, err := f.Write(body); err != nil {
		t.Fatal(err)
	}
	m, err := unix.Mmap(int(f.Fd()), 0, len(body), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(m)
	if err := s.commit(); err != nil {
		t.Fatal(err)
	}
	clear(m)
	if _, err := f.WriteAt([]byte("other"), 0); err != nil {
		t.Fatal(err)
	}
	if on, err := os.ReadFile(s.final + "/manifest"); err != nil || !bytes.Equal(on, body) {
		t.Errorf("the manifest on disk has changed: %d bytes, %v", len(on), err)
	}
	// Nor is it there a second time.
	for _, o := range []fileOrder{
		{Op: fileOpen, Name: s.temp + "/manifest", Flags: snapshotFlags},
		{Op: fileOpen, Name: s.final + "/manifest", Flags: os.O_WRONLY},
		{Op: fileOpen, Name: s.final + "/manifest", Flags: snapshotFlags}, {Op: fileRemove, Name: s.final + "/manifest"},
		{Op: fileRemoveAll, Name: s.final}, {Op: fileRenameNew, Name: s.temp, To: s.final}, {Op: fileMkdir, Name: s.temp},
		{Op: fileLink, Name: s.from + "/memory", To: s.final + "/memory-" + fromID},
	} {
		if _, _, err := s.ask(o); !errors.Is(err, errRefused) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestA_manifest_that_is_too_large_is_not_read(t *testing.T) {
	s := newStore(t)
	f := s.draft(t, s.begin(t, s.options(), false))
	for _, size := range []int64{snapshot.MaxManifestBytes + 1, 1 << 60} {
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		if _, err := readDraft(f); !errors.Is(err, errForged) {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	if err := s.commit(); !errors.Is(err, errForged) {
		t.Errorf("it ended with %v", err)
	}
}

func TestA_process_has_one_attempt_to_finish_a_snapshot(t *testing.T) {
	body := manifest(t)
	s := newStore(t)
	c := s.begin(t, relative(s.options()), false)
	s.must(t, fileOrder{Op: fileMkdir, Name: s.temp})
	if err := s.commit(); !errors.Is(err, errRefused) || c.judged {
		t.Errorf("before the disk is sealed: %v", err)
	}
	s.must(t, fileOrder{Op: fileRemoveAll, Name: s.temp})
	f := s.draft(t, c)
	if err := s.commit(); err == nil {
		t.Error("an empty manifest is accepted")
	}
	if _, err := f.Write(body); err != nil {
		t.Fatal(err)
	}
	if err := s.commit(); !errors.Is(err, errRefused) {
		t.Errorf("the second attempt: %v", err)
	}
}

func TestA_disk_is_sealed_once_and_with_a_layer(t *testing.T) {
	s := newStore(t)
	o, calls := s.options(), 0
	o.Sealed = func(st disk.Stack) error {
		calls++
		if want := []string{s.lower, s.old, s.top}; !slices.Equal(st.Layers, want) {
			t.Errorf("the keeper records %v", st.Layers)
		}
		return nil
	}
	c := s.begin(t, o, false)
	if err := s.v.sealed(c); !errors.Is(err, errRefused) {
		t.Errorf("without a layer: %v", err)
	}
	s.seal(t, c)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			if err := s.v.sealed(c); !errors.Is(err, errRefused) {
				t.Errorf("a second time: %v", err)
			}
		})
	}
	wg.Wait()
	s.v.endCapture(c)
	if err := s.v.sealed(c); !errors.Is(err, errRefused) || calls != 1 {
		t.Errorf("after the capture: %v, after %d calls", err, calls)
	}
}

func TestA_layer_that_could_not_be_recorded_stays_in_the_disk(t *testing.T) {
	s := newStore(t)
	o := s.options()
	full := errors.New("no space for the record")
	o.Sealed = func(disk.Stack) error { return full }
	c := s.begin(t, o, false)
	s.must(t, fileOrder{Op: fileOpen, Name: s.topTemp, Flags: layerFlags})
	s.must(t, fileOrder{Op: fileRename, Name: s.topTemp, To: s.top})
	if err := s.v.sealed(c); !errors.Is(err, full) {
		t.Error(err)
	}
	remove := fileOrder{Op: fileRemove, Name: s.top}
	if _, _, err := s.ask(remove); !errors.Is(err, errRefused) {
		t.Errorf("the layer is removed: %v", err)
	}
	s.must(t, fileOrder{Op: fileMkdir, Name: s.temp})
	if err := s.commit(); !errors.Is(err, errRefused) {
		t.Errorf("a snapshot of a disk that no record has: %v", err)
	}
	s.v.endCapture(c)
	if _, _, err := s.ask(remove); !errors.Is(err, errRefused) {
		t.Errorf("the layer is removed afterwards: %v", err)
	}
	// The next capture has it.
	if next := newCapture(s.v, s.options()); !slices.Equal(next.names, []string{s.lower, s.old, s.top}) {
		t.Errorf("the next snapshot has the layers %v", next.names)
	}
}

// A guest's hooks may refuse after the disk has prepared a layer. The disk removes it before it prepares another.
func TestA_layer_that_was_prepared_in_vain_may_be_removed_later(t *testing.T) {
	s := newStore(t)
	c := s.begin(t, s.options(), true)
	s.must(t, fileOrder{Op: fileOpen, Name: s.topTemp, Flags: layerFlags})
	s.must(t, fileOrder{Op: fileRename, Name: s.topTemp, To: s.top})
	s.v.endCapture(c)
	o := s.options()
	o.NewTop = s.in("layers/" + oneID + "-3")
	c = s.begin(t, o, false)
	s.must(t, fileOrder{Op: fileRemove, Name: s.top})
	for _, name := range []string{s.old, s.otherLayer} {
		if _, _, err := s.ask(fileOrder{Op: fileRemove, Name: name}); !errors.Is(err, errRefused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	s.v.endCapture(c)
	if _, _, err := s.ask(fileOrder{Op: fileRemove, Name: s.top}); !errors.Is(err, errRefused) {
		t.Errorf("a layer that was left before: %v", err)
	}
}

func TestOnly_a_sealed_image_becomes_a_fork_and_once(t *testing.T) {
	sameFDs(t)
	memfd := func(seals int) *os.File {
		fd, err := unix.MemfdCreate("image", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err != nil {
			t.Fatal(err)
		}
		if seals != 0 {
			if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
				t.Fatal(err)
			}
		}
		return os.NewFile(uintptr(fd), "image")
	}
	const all = unix.F_SEAL_SEAL | unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
	regular, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	goodImage := memfd(all)
	images := []*os.File{regular, r, w, memfd(0), memfd(all &^ unix.F_SEAL_SEAL), memfd(all &^ unix.F_SEAL_GROW),
		memfd(all &^ unix.F_SEAL_SHRINK), memfd(all &^ unix.F_SEAL_WRITE), memfd(unix.F_SEAL_FUTURE_WRITE)}
	defer closeAll(append(images, goodImage))

	s := newStore(t)
	o, forks := s.options(), 0
	o.Fork = func(*os.File, *instance.Capture) error { forks++; return nil }
	c := s.begin(t, o, false)
	if err := s.v.forked(c, instance.CaptureCosts{}, []*os.File{goodImage}); !errors.Is(err, errRefused) {
		t.Errorf("before the disk is sealed: %v", err)
	}
	s.seal(t, c)
	for i, f := range images {
		if err := s.v.forked(c, instance.CaptureCosts{}, []*os.File{f}); !errors.Is(err, errRefused) {
			t.Errorf("image %d: %v", i, err)
		}
	}
	for _, files := range [][]*os.File{nil, {goodImage, goodImage}} {
		if err := s.v.forked(c, instance.CaptureCosts{}, files); !errors.Is(err, errRefused) {
			t.Errorf("%d images: %v", len(files), err)
		}
	}
	if err := s.v.forked(c, instance.CaptureCosts{Stored: -1, Pause: -1}, []*os.File{goodImage}); err != nil || forks != 1 {
		t.Errorf("the image: %v, %d forks", err, forks)
	}
	if err := s.v.forked(c, instance.CaptureCosts{}, []*os.File{goodImage}); !errors.Is(err, errRefused) || forks != 1 {
		t.Errorf("a second fork: %v, %d forks", err, forks)
	}
}

func TestA_process_asks_once_for_each_thing_in_a_capture(t *testing.T) {
	s := newStore(t)
	o := s.options()
	counts := map[string]int{}
	var mu sync.Mutex
	count := func(what string) {
		mu.Lock()
		defer mu.Unlock()
		counts[what]++
	}
	o.Still = func() error { count("still"); return nil }
	o.Resumed = func() { count("resumed") }
	o.Prioritize = func() func() { count("prioritized"); return func() { count("calm") } }
	c := s.begin(t, o, false)
	var wg sync.WaitGroup
	for range 20 {
		for _, m := range []string{callStill, callResumed, callPrioritize, postCalm} {
			wg.Go(func() { _, _, _ = s.v.serve(t.Context(), m, []byte("{}"), nil) })
		}
	}
	wg.Wait()
	s.v.endCapture(c)
	for _, m := range []string{callStill, callResumed, callPrioritize, callSealed, callForked, postCalm} {
		_, _, _ = s.v.serve(t.Context(), m, []byte("{}"), nil)
		if _, _, err := s.v.serveCapture(c, m, []byte("{}"), nil); !errors.Is(err, errRefused) {
			t.Errorf("%s after the capture: %v", m, err)
		}
	}
	for _, what := range []string{"still", "resumed", "prioritized", "calm"} {
		if counts[what] != 1 {
			t.Errorf("%s: %d times", what, counts[what])
		}
	}
}

// A child that dies asks for nothing more.
func TestA_process_that_dies_in_a_capture_leaves_nothing_unfinished(t *testing.T) {
	errDead := errors.New("the process has died")
	steps := 0
	for n := 0; ; n++ {
		s := newStore(t)
		o := s.options()
		c := s.begin(t, o, false)
		asked := 0
		alive := func() bool { asked++; return asked <= n }
		ask := func(o fileOrder) error {
			if !alive() {
				return errDead
			}
			_, files, err := s.ask(o)
			return errors.Join(err, closeAll(files))
		}
		err := ask(fileOrder{Op: fileOpen, Name: s.topTemp, Flags: layerFlags})
		if err == nil {
			err = ask(fileOrder{Op: fileRename, Name: s.topTemp, To: s.top})
		}
		if err == nil && !alive() {
			err = errDead
		}
		if err == nil {
			err = s.v.sealed(c)
		}
		if err == nil {
			fsys := &passedFS{ask: func(o fileOrder) (fileInfo, []*os.File, error) {
				if !alive() {
					return fileInfo{}, nil, errDead
				}
				return s.ask(o)
			}}
			err = s.write(t.Context(), func(sp *snapshot.Spec) { sp.FS = fsys })
		}
		if n%2 == 1 { // the keeper is killed too
			if c.lock != nil {
				c.lock.Close()
			}
			if _, err := snapshot.Clean(s.in("snapshots")); err != nil {
				t.Fatal(err)
			}
		}
		s.v.endCapture(c)
		left, rerr := filepath.Glob(s.in("*/.*"))
		if rerr != nil {
			t.Fatal(rerr)
		}
		other := s.in("snapshots/.drowse-snapshot-other")
		left = slices.DeleteFunc(left, func(name string) bool { return name == other })
		if len(left) > 0 {
			t.Errorf("after %d steps %v is left", n, left)
		}
		if err == nil {
			break
		}
		if !errors.Is(err, errDead) {
			t.Fatal(err)
		}
		steps++
	}
	if steps < 8 {
		t.Errorf("there were only %d steps", steps)
	}
}
