package state

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/drowse-vm/drowse/netpolicy"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/image/builder"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/sandbox/events"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
	"github.com/drowse-vm/drowse/vmm"
)

// A host is a store with an image, a kernel and the disk of an agent, like one in use, and without a guest.
type host struct {
	*Store
	t     *testing.T
	Image string
	facts string
}

// agentDisk is the agent's disk, with a name as package sysdisk makes it.
const agentDisk = "cache/sysdisk/0123456789abcdef0123456789abcdef.erofs"

func newHost(t *testing.T) *host {
	t.Helper()
	s, err := OpenStore(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := &host{Store: s, t: t}
	tree := t.TempDir()
	h.Write(filepath.Join(tree, "f"), "a file of the image")
	images, err := image.OpenStore(s.ImageDir())
	if err != nil {
		t.Fatal(err)
	}
	img, err := builder.Build(t.Context(), builder.Options{Store: images, From: "dir:" + tree})
	if err != nil {
		t.Fatal(err)
	}
	h.Image = img.ID
	putKernel(t, s, "built-1", kernel.Built, "CONFIG_TUN=y\n")
	h.Write(filepath.Join(s.Dir(), agentDisk), "the agent")
	// The store looks as if a VM had run here.
	h.facts = "facts of this host"
	instance.NoteGoodFacts(h.facts)
	return h
}

// another returns a store with the same image and kernel, and nothing else.
func (h *host) another() *host {
	h.t.Helper()
	s, err := OpenStore(h.t.TempDir())
	if err != nil {
		h.t.Fatal(err)
	}
	for _, dir := range []string{"images", "kernels"} {
		if err := os.CopyFS(filepath.Join(s.Dir(), dir), os.DirFS(filepath.Join(h.dir, dir))); err != nil {
			h.t.Fatal(err)
		}
	}
	o := *h
	o.Store = s
	return &o
}

func (h *host) Write(path, text string) {
	h.t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		h.t.Fatal(err)
	}
}

const testDiskSize = 64 << 20

// Layer makes a sealed layer over others, with a word in its first block.
func (h *host) Layer(name, word string, below ...string) {
	h.t.Helper()
	path := filepath.Join(h.LayerDir(), name)
	var st disk.Stack
	for _, l := range below {
		st.Layers = append(st.Layers, filepath.Join(h.LayerDir(), l))
	}
	var err error
	if len(below) == 0 {
		st, err = disk.Create(path, testDiskSize)
	} else {
		st, err = disk.Fork(path, st, 0)
	}
	if err != nil {
		h.t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{})
	if err != nil {
		h.t.Fatal(err)
	}
	block := make([]byte, disk.BlockSize)
	copy(block, word)
	_, err = d.WriteAt(block, 0)
	if err := errors.Join(err, d.CloseSealed()); err != nil {
		h.t.Fatal(err)
	}
}

// Word returns the word at the beginning of the first block of a stack.
func (h *host) Word(layers ...string) string {
	h.t.Helper()
	st, err := h.Absolute(disk.Stack{Layers: layers})
	if err != nil {
		h.t.Fatal(err)
	}
	d, err := disk.Open(st, disk.Options{ReadOnly: true})
	if err != nil {
		h.t.Fatal(err)
	}
	defer d.Close()
	b := make([]byte, 16)
	if _, err := d.ReadAt(b, 0); err != nil {
		h.t.Fatal(err)
	}
	return strings.TrimRight(string(b), "\x00")
}

// Record returns the record of an ordinary VM.
func (h *host) Record(name string, layers ...string) *Record {
	return &Record{
		Version: RecordVersion, ID: spec.NewID(), Created: time.Now().UTC(), Phase: Asleep,
		Spec: spec.VM{Name: name, Image: "app", VCPUs: 1, MemoryMiB: 64, DiskMiB: testDiskSize >> 20, Hostname: name, Network: spec.NetworkNone},
		Boot: BootFiles{KernelID: "built-1", Kernel: "kernels/built-1/vmlinux", SystemDisk: agentDisk, ImageID: h.Image},
		Disk: disk.Stack{Layers: layers},
	}
}

// Snapshot writes a snapshot of a VM, as its process would. change, if not nil, first changes its spec.
func (h *host) Snapshot(r *Record, kind string, change func(*snapshot.Spec)) string {
	h.t.Helper()
	labels, err := h.Labels(r, kind)
	if err != nil {
		h.t.Fatal(err)
	}
	spec := snapshot.Spec{
		ID: spec.NewID(), Sandbox: r.Spec.Name, VCPUs: r.Spec.VCPUs, Image: r.Boot.ImageID, Kernel: r.Boot.KernelID,
		Disks: []snapshot.Disk{{Name: instance.DeviceDisk, Size: testDiskSize, Layers: r.Disk.Layers}},
		Host:  map[string]string{instance.FactsKey: h.facts}, Labels: labels, Memory: NoMemory{},
	}
	if change != nil {
		change(&spec)
	}
	if _, err := snapshot.Create(h.t.Context(), h.SnapshotDir(spec.ID), spec); err != nil {
		h.t.Fatal(err)
	}
	return spec.ID
}

// stream exports a snapshot.
func (h *host) stream(id string) []byte {
	h.t.Helper()
	var b bytes.Buffer
	if err := h.ExportSnapshot(h.t.Context(), id, &b); err != nil {
		h.t.Fatal(err)
	}
	return b.Bytes()
}

// forged exports a snapshot with only these layers, whatever its manifest says, and with the agent's disk. layers
// maps the names in the manifest to layers of this store.
func (h *host) forged(id string, layers map[string]string) []byte {
	h.t.Helper()
	var files []snapshot.ExtraFile
	add := func(name string, b []byte) {
		files = append(files, snapshot.ExtraFile{Name: name, Size: int64(len(b)), Open: func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(b)), nil
		}})
	}
	for name, from := range layers {
		var b bytes.Buffer
		if err := disk.Pack(h.t.Context(), &b, filepath.Join(h.LayerDir(), from)); err != nil {
			h.t.Fatal(err)
		}
		add(name, b.Bytes())
	}
	add(SystemFile, []byte("the agent"))
	var b bytes.Buffer
	if err := snapshot.Export(h.t.Context(), &b, h.SnapshotDir(id), files); err != nil {
		h.t.Fatal(err)
	}
	return b.Bytes()
}

// take imports a stream, which must succeed.
func (h *host) take(stream []byte, o ImportOptions) (ImportResult, *snapshot.Manifest) {
	h.t.Helper()
	res, err := h.ImportSnapshot(h.t.Context(), bytes.NewReader(stream), o)
	if err != nil {
		h.t.Fatal(err)
	}
	m, err := h.Manifest(res.ID)
	if err != nil {
		h.t.Fatal(err)
	}
	return res, m
}

func recordOf(t *testing.T, m *snapshot.Manifest) (r Record) {
	t.Helper()
	if err := json.Unmarshal([]byte(m.Labels[LabelRecord]), &r); err != nil {
		t.Fatal(err)
	}
	return r
}

// greedy returns the record of a VM that asks for everything.
func (h *host) greedy() *Record {
	h.t.Helper()
	p, err := netpolicy.Parse([]byte("publish: [{listen: \"0.0.0.0:22\", port: 22, protocol: tcp}]\n"))
	if err != nil {
		h.t.Fatal(err)
	}
	h.Layer("ext4-1-64-0123456789abcdef.layer", "stranger")
	r := h.Record("greedy", "ext4-1-64-0123456789abcdef.layer")
	r.Spec.Network, r.Spec.Policy, r.Spec.Tags, r.Spec.IPv6 = spec.NetworkTAP, p, []string{"db-client"}, true
	r.Spec.Kernel, r.Spec.Cmdline, r.Spec.NoACPI = "/etc/shadow", "init=/bin/sh", true
	r.Spec.Self = spec.Self{Allow: []string{"fork=64", "extend=87600h"}}
	r.Spec.Hooks, r.Spec.Idle = spec.Hooks{Policy: spec.HooksSkip}, spec.Idle{SleepSeconds: 1}
	r.Spec.Services = []spec.Service{{Name: "miner", Argv: []string{"/bin/miner"}}}
	r.Boot.Kernel, r.Lineage, r.TrustedCA = "/etc/shadow", spec.NewID(), "00"
	r.Secrets = []spec.SecretFile{{Name: "token"}}
	return r
}

func TestAttack_import_brings_no_policy_tags_grants_kernel_path_or_owner(t *testing.T) {
	from := newHost(t)
	victim := spec.NewID()
	id := from.Snapshot(from.greedy(), KindSleep, func(s *snapshot.Spec) {
		s.Labels[labelOwner], s.Labels["drowse.unknown"], s.Labels[LabelNote] = victim, "?", "words"
	})
	stream := from.stream(id)
	to := from.another()
	res, m := to.take(stream, ImportOptions{})
	want := []string{"cmdline", "hooks", "idle", "ipv6", "kernel", "no_acpi", "owner", "policy", "self", "services", "tags"}
	if !slices.Equal(res.Dropped, want) {
		t.Errorf("said to be dropped are %q, want %q", res.Dropped, want)
	}
	if res.Kind != KindNamed || res.Owner != "" || res.Note != "words" || !res.Kept {
		t.Errorf("it is %+v", res.SnapshotInfo)
	}
	if len(m.Labels) != 3 || m.Labels[labelKind] != KindNamed || m.Labels[LabelNote] == "" {
		t.Errorf("its labels are %v", m.Labels)
	}
	if p, err := PolicyOf(m.Labels); err != nil || p != nil {
		t.Errorf("its policy is %v (%v)", p, err)
	}
	r := recordOf(t, m)
	system := r.Boot.SystemDisk
	r.Boot.SystemDisk = ""
	if got := (Record{
		Version: RecordVersion,
		Spec:    spec.VM{Name: "greedy", Hostname: "greedy", Image: from.Image, VCPUs: 1, MemoryMiB: 64, DiskMiB: 64, Network: spec.NetworkTAP},
		Boot:    BootFiles{ImageID: from.Image, KernelID: "built-1"},
	}); !reflect.DeepEqual(r, got) {
		t.Errorf("the record of its VM is\n%s", asJSON(t, r))
	}
	if b, err := os.ReadFile(to.BootPath(system)); err != nil || string(b) != "the agent" || filepath.IsAbs(system) {
		t.Errorf("the agent's disk is %q: %q (%v)", system, b, err)
	}
	var told []events.Event
	_, err := to.Events().Read(t.Context(), events.ReadOptions{}, func(e events.Event) error { told = append(told, e); return nil })
	if err != nil || len(told) != 1 || told[0].Type != events.Imported || told[0].Details.Snapshot != id || !slices.Equal(told[0].Details.Dropped, want) {
		t.Errorf("told was %+v (%v)", told, err)
	}

	// With Trust an import keeps everything.
	trusting := from.another()
	res, m = trusting.take(stream, ImportOptions{Trust: true})
	if len(res.Dropped) != 0 || res.Owner != victim || res.Kind != KindSleep {
		t.Errorf("with trust it is %+v", res)
	}
	if p, err := PolicyOf(m.Labels); err != nil || p == nil {
		t.Errorf("with trust its policy is %v (%v)", p, err)
	}
	if r := recordOf(t, m); r.Spec.Kernel != "/etc/shadow" || !slices.Equal(r.Spec.Tags, []string{"db-client"}) || len(r.Spec.Self.Allow) != 2 {
		t.Errorf("with trust the record is\n%s", asJSON(t, r))
	}
}

// The author of a new field must say here what an import does with it.
func TestAttack_import_decides_about_every_field_of_a_record(t *testing.T) {
	const kept, replaced, dropped = "kept", "replaced by what this store has", "dropped"
	for _, tt := range []struct {
		of   reflect.Type
		got  func(*Record) any
		does map[string]string
	}{
		{reflect.TypeFor[Record](), func(r *Record) any { return *r }, map[string]string{
			"Version": kept, "Spec": kept, "Boot": kept,
			"ID": dropped, "Created": dropped, "Template": dropped, "Booted": dropped, "Phase": dropped, "PID": dropped, "Confined": dropped,
			"Maker": dropped, "Disk": dropped, "NextLayer": dropped,
			"Snapshot": dropped, "NetworkID": dropped, "Exit": dropped, "Problem": dropped, "Parent": dropped, "Fork": dropped, "Base": dropped,
			"Lineage": dropped, "TrustedCA": dropped, "Secrets": dropped, "Resumed": dropped, "Previous": dropped, "Left": dropped, "Rotated": dropped, "DiskUsed": dropped, "Awake": dropped,
			"Sleeps": dropped, "Former": dropped, "NextName": dropped, "metadata": dropped,
		}},
		{reflect.TypeFor[spec.VM](), func(r *Record) any { return r.Spec }, map[string]string{
			"Name": kept, "Hostname": kept, "VCPUs": kept, "MemoryMiB": kept, "DiskMiB": kept, "DiskQuotaMiB": dropped, "Network": kept, "Image": replaced,
			"Kernel": dropped, "IPv6": dropped, "Policy": dropped, "Tags": dropped, "Cmdline": dropped, "NoACPI": dropped, "Hooks": dropped,
			"Idle": dropped, "Volumes": dropped, "Shares": dropped, "Services": dropped, "Self": dropped,
		}},
		{reflect.TypeFor[BootFiles](), func(r *Record) any { return r.Boot }, map[string]string{
			"ImageID": replaced, "KernelID": kept, "SystemDisk": kept, // until findKernel and adoptSystem
			"Kernel": dropped, "Initramfs": dropped, "Cmdline": dropped, "Image": dropped,
		}},
	} {
		var sent Record
		fill(reflect.ValueOf(&sent).Elem())
		im := &importing{}
		got := reflect.ValueOf(tt.got(im.admitted(&snapshot.Manifest{Image: "by content"}, &sent)))
		for i := range tt.of.NumField() {
			f := tt.of.Field(i)
			does, decided := tt.does[f.Name]
			switch zero := got.Field(i).IsZero(); {
			case !decided:
				t.Errorf("nobody has said what an import does with %v.%s: drop it in importing.admitted, or keep it if a stranger may choose it, and say so here", tt.of, f.Name)
			case zero != (does == dropped):
				t.Errorf("%v.%s is to be %s, and is %v", tt.of, f.Name, does, got.Field(i))
			case does == replaced && got.Field(i).String() != "by content":
				t.Errorf("%v.%s is %v", tt.of, f.Name, got.Field(i))
			}
			if tt.of == reflect.TypeFor[spec.VM]() && does == dropped {
				if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); !slices.Contains(im.dropped, name) {
					t.Errorf("that %s is dropped is not said: %q", name, im.dropped)
				}
			}
		}
	}
}

// fill sets each field to a value that is not zero.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(true)
	case reflect.String:
		v.SetString("x")
	case reflect.Int, reflect.Int64, reflect.Int32:
		v.SetInt(1)
	case reflect.Uint64, reflect.Uint32, reflect.Uint16, reflect.Uint8:
		v.SetUint(1)
	case reflect.Float64:
		v.SetFloat(1)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Field(i).CanSet() {
				fill(v.Field(i))
			}
		}
	}
}

func TestAttack_import_gets_no_layer_of_a_local_VM_by_its_name(t *testing.T) {
	from := newHost(t)
	secret, secretUpper := spec.NewID()+"-1", spec.NewID()+"-2"
	// The stranger makes layers with these names to get a snapshot of them, and leaves them out of the stream.
	from.Layer(secret, "bait")
	from.Layer(secretUpper, "bait", secret)
	r := from.Record("x", secret, secretUpper)
	id := from.Snapshot(r, KindNamed, nil)
	for name, layers := range map[string]map[string]string{
		"none of them is in the stream": {},
		"only the upper one is":         {secretUpper: secretUpper},
		"only the lower one is":         {secret: secret},
	} {
		t.Run(name, func(t *testing.T) {
			to := from.another()
			to.Layer(secret, "local secret")
			to.Layer(secretUpper, "another secret", secret)
			defer func() {
				if got := to.Word(secret, secretUpper); got != "another secret" {
					t.Errorf("the local disk begins with %q", got)
				}
			}()
			stream := from.forged(id, layers)
			res, err := to.ImportSnapshot(t.Context(), bytes.NewReader(stream), ImportOptions{})
			if err != nil {
				if to.IsThere(id) {
					t.Error("it is there all the same")
				}
				return
			}
			m, err := to.Manifest(res.ID)
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range SnapshotStack(m).Layers {
				if l == secret || l == secretUpper {
					t.Errorf("its disk has the layer %s of a local VM", l)
				}
			}
			if got := to.Word(SnapshotStack(m).Layers...); got != "bait" {
				t.Errorf("its disk begins with %q", got)
			}
		})
	}
}

func TestAttack_import_takes_no_name_that_a_local_VM_is_going_to_give_a_layer(t *testing.T) {
	from := newHost(t)
	to := from.another()
	local := spec.NewID()
	to.Layer(local+"-1", "local")
	from.Layer(local+"-1", "stranger")
	from.Layer(local+"-2", "stranger 2", local+"-1")
	id := from.Snapshot(from.Record("x", local+"-1", local+"-2"), KindNamed, nil)
	_, m := to.take(from.stream(id), ImportOptions{})
	if got := to.Word(local + "-1"); got != "local" {
		t.Errorf("the layer of the local VM begins with %q", got)
	}
	if _, err := os.Lstat(filepath.Join(to.LayerDir(), local+"-2")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the name of the VM's next layer is taken (%v)", err)
	}
	if got := to.Word(SnapshotStack(m).Layers...); got != "stranger 2" {
		t.Errorf("the disk of what was imported begins with %q", got)
	}
	// The same layers with the same names are not stored twice.
	back := from.another()
	for _, l := range []string{local + "-1", local + "-2"} {
		if err := os.Link(filepath.Join(from.LayerDir(), l), filepath.Join(back.LayerDir(), l)); err != nil {
			t.Fatal(err)
		}
	}
	_, m = back.take(from.stream(id), ImportOptions{})
	if got := SnapshotStack(m).Layers; !slices.Equal(got, []string{local + "-1", local + "-2"}) {
		t.Errorf("where they are there already its layers are %v", got)
	}
	if got := back.Word(SnapshotStack(m).Layers...); got != "stranger 2" {
		t.Errorf("where they are there already its disk begins with %q", got)
	}
}

func TestAttack_import_is_not_given_volumes_and_shares_by_name(t *testing.T) {
	from := newHost(t)
	from.Layer("ext4-1-64-0123456789abcdef.layer", "x")
	for name, tt := range map[string]struct {
		change func(*Record, map[string]string)
		want   error
	}{
		"a share": {func(r *Record, _ map[string]string) { r.Spec.Shares = []spec.Share{{Source: "/etc", Path: "/b"}} }, spec.ErrShare},
		"a volume": {func(r *Record, _ map[string]string) {
			r.Spec.Volumes = []spec.VolumeMount{{Name: "data", Path: "/data"}}
		}, ErrImport},
		"a volume that its label names":  {func(_ *Record, l map[string]string) { l[instance.LabelVolumes] = `[{"name":"data"}]` }, ErrImport},
		"a record that cannot be read":   {func(_ *Record, l map[string]string) { l[LabelRecord] = "{" }, spec.ErrRecord},
		"a record of another version":    {func(r *Record, _ map[string]string) { r.Version = 7 }, spec.ErrRecord},
		"another processor than this":    {func(_ *Record, l map[string]string) { l["facts"] = `{"arch":"arm64"}` }, vmm.ErrForeign},
		"none of them, which is allowed": {func(*Record, map[string]string) {}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := from.Record("x", "ext4-1-64-0123456789abcdef.layer")
			extra := map[string]string{}
			tt.change(r, extra)
			id := from.Snapshot(r, KindNamed, func(s *snapshot.Spec) {
				for k, v := range extra {
					if k == "facts" {
						s.Host[instance.FactsKey] = v
						continue
					}
					s.Labels[k] = v
				}
			})
			to := from.another()
			_, err := to.ImportSnapshot(t.Context(), bytes.NewReader(from.forged(id, map[string]string{r.Disk.Layers[0]: r.Disk.Layers[0]})), ImportOptions{})
			if !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
			if to.IsThere(id) != (tt.want == nil) {
				t.Error("whether it is there does not fit")
			}
		})
	}
}

func TestAttack_import_does_not_become_what_a_local_VM_comes_back_from(t *testing.T) {
	from := newHost(t)
	from.Layer("ext4-1-64-0123456789abcdef.layer", "x")
	id := from.Snapshot(from.Record("x", "ext4-1-64-0123456789abcdef.layer"), KindFork, nil)
	stream := from.stream(id)
	for name, change := range map[string]func(*Record){
		"it sleeps in it":               func(r *Record) { r.Snapshot = id },
		"it was taken back from it":     func(r *Record) { r.Snapshot, r.Previous = spec.NewID(), id },
		"its fork has begun as it":      func(r *Record) { r.Fork, r.Parent = &Origin{Parent: "y"}, id },
		"its next snapshot builds upon": func(r *Record) { r.Base = id },
	} {
		t.Run(name, func(t *testing.T) {
			to := from.another()
			r := to.Record("local")
			change(r)
			l, err := to.Create(r)
			if err != nil {
				t.Fatal(err)
			}
			l.Release()
			if _, err := to.ImportSnapshot(t.Context(), bytes.NewReader(stream), ImportOptions{}); !errors.Is(err, ErrImport) {
				t.Errorf("got %v, want ErrImport", err)
			}
			if to.IsThere(id) {
				t.Error("it is there")
			}
			to.take(stream, ImportOptions{Trust: true}) // a copy made before the snapshot was lost
		})
	}
}

func TestAttack_import_succeeds_only_if_a_restore_has_all_that_it_needs(t *testing.T) {
	from := newHost(t)
	from.Layer("ext4-1-64-0123456789abcdef.layer", "x")
	r := from.Record("x", "ext4-1-64-0123456789abcdef.layer")
	id := from.Snapshot(r, KindNamed, nil)
	whole := from.stream(id)
	withoutAgent := func() []byte {
		s := *from
		bare := *r
		bare.Boot.SystemDisk = ""
		// Older versions exported this: the record names the disk, but the stream does not have it.
		id := s.Snapshot(&bare, KindNamed, func(sp *snapshot.Spec) {
			labels, err := s.Labels(r, KindNamed)
			if err != nil {
				t.Fatal(err)
			}
			sp.Labels = labels
		})
		if err := os.Rename(filepath.Join(s.Dir(), agentDisk), filepath.Join(s.Dir(), "aside")); err != nil {
			t.Fatal(err)
		}
		defer os.Rename(filepath.Join(s.Dir(), "aside"), filepath.Join(s.Dir(), agentDisk)) //nolint:errcheck // checked by what follows
		var b bytes.Buffer
		if err := s.ExportSnapshot(t.Context(), id, &b); err == nil {
			t.Error("an export without the agent's disk succeeded")
		}
		b.Reset()
		var pack bytes.Buffer
		if err := disk.Pack(t.Context(), &pack, filepath.Join(s.LayerDir(), r.Disk.Layers[0])); err != nil {
			t.Fatal(err)
		}
		layer := snapshot.ExtraFile{Name: r.Disk.Layers[0], Size: int64(pack.Len()), Open: func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(pack.Bytes())), nil
		}}
		if err := snapshot.Export(t.Context(), &b, s.SnapshotDir(id), []snapshot.ExtraFile{layer}); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}()
	remove := func(path string) func(*host) {
		return func(h *host) {
			if err := os.RemoveAll(filepath.Join(h.dir, path)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, tt := range map[string]struct {
		stream []byte
		change func(*host)
		want   error
		says   string
	}{
		"all is there":                           {whole, func(*host) {}, nil, ""},
		"no image":                               {whole, remove("images/" + from.Image), image.ErrNotFound, "images/" + from.Image},
		"a damaged image":                        {whole, remove("images/" + from.Image + "/root.erofs"), image.ErrCorrupt, "root.erofs"},
		"no kernel":                              {whole, remove("kernels/built-1"), kernel.ErrNotFound, "drowse kernel build"},
		"an older export without the agent":      {withoutAgent, func(*host) {}, ErrImport, "export it again"},
		"and a store that has the agent already": {withoutAgent, func(h *host) { h.Write(filepath.Join(h.dir, agentDisk), "the agent") }, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			to := from.another()
			tt.change(to)
			res, err := to.ImportSnapshot(t.Context(), bytes.NewReader(tt.stream), ImportOptions{})
			if !errors.Is(err, tt.want) || err != nil && !strings.Contains(err.Error(), tt.says) {
				t.Fatalf("got %v, want %v that says %q", err, tt.want, tt.says)
			}
			if err != nil {
				if left, err := os.ReadDir(filepath.Join(to.dir, "snapshots")); err != nil || len(left) != 0 {
					t.Errorf("%v is left (%v)", left, err)
				}
				if _, err := os.Lstat(to.keptPath(id)); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("its mark is left (%v)", err)
				}
				return
			}
			if err := to.VerifySnapshot(t.Context(), res.ID); err != nil {
				t.Error(err)
			}
			m, err := to.Manifest(res.ID)
			if err != nil {
				t.Fatal(err)
			}
			if b, err := os.ReadFile(to.BootPath(recordOf(t, m).Boot.SystemDisk)); err != nil || string(b) != "the agent" {
				t.Errorf("the agent's disk has %q (%v)", b, err)
			}
		})
	}
}

// A tiny layer may claim to be of a disk of terabytes, whose index would take gigabytes of memory, or may not be
// sealed.
func TestAttack_import_refuses_layers_that_are_too_large_or_not_sealed(t *testing.T) {
	const layer = "ext4-1-64-0123456789abcdef.layer"
	for name, tt := range map[string]struct {
		size   int64
		sealed bool
		want   error
	}{
		"a disk of 8 TiB":    {8 << 40, true, ErrImport},
		"one that is open":   {testDiskSize, false, disk.ErrCorrupt},
		"as it is to be":     {testDiskSize, true, nil},
		"the largest of all": {spec.MaxDiskMiB << 20, true, nil},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			st, err := disk.Create(filepath.Join(h.LayerDir(), layer), tt.size)
			if err != nil {
				t.Fatal(err)
			}
			d, err := disk.Open(st, disk.Options{})
			if err != nil {
				t.Fatal(err)
			}
			if tt.sealed {
				err = d.CloseSealed()
			} else {
				err = d.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
			id := h.Snapshot(h.Record("x", layer), KindNamed, nil)
			to := h.another()
			if _, err := to.ImportSnapshot(t.Context(), bytes.NewReader(h.forged(id, map[string]string{layer: layer})), ImportOptions{}); !errors.Is(err, tt.want) {
				t.Errorf("got %v, want %v", err, tt.want)
			}
			left, err := os.ReadDir(to.LayerDir())
			if want := 1; err != nil || tt.want == nil && len(left) != want || tt.want != nil && len(left) != 0 {
				t.Errorf("in the store are the layers %v (%v)", left, err)
			}
		})
	}
}
