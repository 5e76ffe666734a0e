package state

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/rootfs/disk"
	"github.com/drowse-vm/drowse/rootfs/image"
	"github.com/drowse-vm/drowse/rootfs/kernel"
	"github.com/drowse-vm/drowse/rootfs/sysdisk"
	"github.com/drowse-vm/drowse/sandbox/instance"
	"github.com/drowse-vm/drowse/sandbox/spec"
	"github.com/drowse-vm/drowse/snapshot"
)

// What a stranger's stream may put into the store.

// layerName matches the names of disk layers in all stores: by the VM that wrote them, by their content if they
// were imported, or as empty file systems.
var layerName = lazyregexp.New(`^([0-9a-f]{32}-[0-9]{1,9}|sha256-[0-9a-f]{64}|ext4-[0-9]{1,3}-[0-9]{1,16}-[0-9a-f]{16}\.layer)$`)

// contentPrefix begins the names of files that are named by the SHA-256 of what was sent. Only an import makes
// such names, so a stranger cannot choose the name of a file that a VM of this store has, or will make.
const contentPrefix = "sha256-"

// importPrefix begins the names of files that nothing names yet. A sweep deletes those that an import has left in
// the layers' directory.
const importPrefix = "import-"

// maxSystemDisk bounds the disk with the agent, in bytes: the agent, and the overhead of the file system.
const maxSystemDisk = sysdisk.MaxAgent + 1<<20

// importing takes the files of one imported snapshot and decides what is accepted of its manifest. It implements
// snapshot.Placer.
type importing struct {
	ctx   context.Context
	store *Store
	trust bool
	id    string
	kept  bool
	// record is the VM's record as it will be in the snapshot; nil until it is admitted.
	record  *Record
	dropped []string
	// layers maps names of layers in the stream to their names here. system is the path of the disk with the
	// agent, empty if it is not in the stream.
	layers map[string]string
	system string
	// coming is the directory of those layers that are on their way.
	coming string
}

// Admit implements snapshot.Placer. It refuses what could never run here, before more of the stream is read.
func (im *importing) Admit(m *snapshot.Manifest) error {
	im.id = m.ID
	images, err := image.OpenStore(im.store.ImageDir())
	if err != nil {
		return err
	}
	img, err := images.ByID(m.Image)
	if err == nil {
		err = images.Check(img)
	}
	if err != nil {
		return fmt.Errorf("the image whose files its guest has in use, by their SHA-256: %w: copy the folder images/%.64s from the store that the snapshot comes from, or build the same image here", err, m.Image)
	}
	if !im.trust {
		if err := im.store.notAwaited(m.ID); err != nil {
			return err
		}
	}
	var r Record
	if err := json.Unmarshal([]byte(m.Labels[LabelRecord]), &r); err != nil {
		return fmt.Errorf("%w: its record: %w", spec.ErrRecord, err)
	}
	if r.Version != RecordVersion {
		return fmt.Errorf("%w: its record has version %d, this build reads %d", spec.ErrRecord, r.Version, RecordVersion)
	}
	if DiskOnly(m) { // a disk fits every host, and boots with its own devices
		im.record = im.admitted(m, &r)
		return nil
	}
	if err := instance.CheckHost(m.Host); err != nil {
		return err
	}
	if !im.trust {
		if err := checkImportedMounts(m, &r); err != nil {
			return err
		}
	}
	im.record = im.admitted(m, &r)
	return im.findKernel(&r)
}

// checkImportedMounts refuses a guest that uses disks or directories that are not in the stream: here their names
// would give it whatever has the same names.
func checkImportedMounts(m *snapshot.Manifest, r *Record) error {
	held, err := instance.HeldVolumes(m)
	if err != nil {
		return err
	}
	remedy := "export a snapshot of a VM without it, or the disk alone (snapshot create --disk-only); or import it with --trust if you know who has made it"
	switch {
	case len(r.Spec.Shares) > 0:
		return fmt.Errorf("%w: its guest has %.1024q of the host that it comes from: %s", spec.ErrShare, r.Spec.Shares[0].Source, remedy)
	case len(r.Spec.Volumes) > 0:
		return fmt.Errorf("%w: its guest has the volume %.64q in use, which is not in the stream: %s", ErrImport, r.Spec.Volumes[0].Name, remedy)
	case len(held) > 0:
		return fmt.Errorf("%w: its guest has the volume %.64q in use, which is not in the stream: %s", ErrImport, held[0].Name, remedy)
	}
	return nil
}

// notAwaited refuses the id of a snapshot that a VM of this store would come back from if it existed: with the
// stranger's memory, and the VM's own grants.
func (s *Store) notAwaited(id string) error {
	records, err := s.List()
	if err != nil {
		return fmt.Errorf("looking for VMs that come back from snapshot %s: %w", id, err)
	}
	for _, r := range records {
		awaits := r.Snapshot == id || r.Previous == id || r.Left == id || r.Base == id || r.Fork != nil && r.Parent == id
		if l, err := s.Metadata(r.Spec.Name); err == nil && l.Rotate.To == id {
			awaits = true
		}
		if awaits {
			return fmt.Errorf("%w: VM %s would come back from a snapshot of that id: remove the VM, or import it with --trust if it is your own copy of what is gone", ErrImport, r.Spec.Name)
		}
	}
	return nil
}

// admitted returns what is accepted of the record in a stream. It drops everything that is not named here.
func (im *importing) admitted(m *snapshot.Manifest, r *Record) *Record {
	if im.trust {
		return r
	}
	kept := &Record{
		Version: RecordVersion,
		// Without its id: VMs made of it get their own lineage.
		Spec: spec.VM{
			Name: r.Spec.Name, Hostname: r.Spec.Hostname, // words; a clone has its own
			Image: m.Image,
			VCPUs: r.Spec.VCPUs, MemoryMiB: r.Spec.MemoryMiB, DiskMiB: r.Spec.DiskMiB,
			// A device of the machine. Without a policy nothing passes.
			Network: r.Spec.Network,
		},
		Boot: BootFiles{ImageID: m.Image, KernelID: r.Boot.KernelID, SystemDisk: r.Boot.SystemDisk},
	}
	im.dropped = droppedFields(&kept.Spec, &r.Spec)
	for name, there := range map[string]bool{
		"policy": m.Labels[LabelPolicy+"0"] != "", "owner": m.Labels[labelOwner] != "", "secrets": len(r.Secrets) > 0,
	} {
		if there && !slices.Contains(im.dropped, name) {
			im.dropped = append(im.dropped, name)
		}
	}
	slices.Sort(im.dropped)
	return kept
}

// droppedFields returns the JSON names of the fields of a Spec that are set in from and differ in kept. It skips
// the image, which is identified by its content.
func droppedFields(kept, from *spec.VM) (names []string) {
	k, f := reflect.ValueOf(*kept), reflect.ValueOf(*from)
	for i := range k.NumField() {
		name, _, _ := strings.Cut(k.Type().Field(i).Tag.Get("json"), ",")
		if name != "image" && !f.Field(i).IsZero() && !reflect.DeepEqual(k.Field(i).Interface(), f.Field(i).Interface()) {
			names = append(names, name)
		}
	}
	return names
}

// findKernel chooses the kernel that a VM of the snapshot boots next time; memory has its own. It is the same
// kernel if the store has it, otherwise another one of its kind.
func (im *importing) findKernel(sent *Record) error {
	r := im.record
	if im.trust && strings.Contains(r.Spec.Kernel, "/") {
		return nil
	}
	dir := im.store.KernelDir()
	if k, err := kernel.Open(dir, sent.Boot.KernelID); err == nil && (k.Kind == kernel.Built) == (sent.Boot.SystemDisk != "") {
		return nil
	}
	r.Boot.KernelID, r.Spec.Kernel = "", string(kernel.Debian)
	if sent.Boot.SystemDisk != "" {
		r.Spec.Kernel = string(kernel.Built)
	}
	if _, err := kernel.Find(dir, r.Spec.Kernel); err != nil {
		return fmt.Errorf("a kernel for the next boot of what is made of it, of the kind %q: %w", r.Spec.Kernel, err)
	}
	return nil
}

// Place implements snapshot.Placer.
func (im *importing) Place(name string, size int64) (snapshot.Placement, error) {
	dir := im.store.LayerDir()
	switch {
	case name == SystemFile && size > maxSystemDisk:
		return nil, fmt.Errorf("a system disk of %d bytes: %w: at most %d are possible", size, snapshot.ErrForeign, maxSystemDisk)
	case name == SystemFile:
		dir = im.store.systemDir()
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, err
		}
	case !layerName.MatchString(name):
		return nil, fmt.Errorf("layer %q: %w: no store calls a layer so", name, snapshot.ErrForeign)
	}
	f, err := os.CreateTemp(dir, importPrefix+"*")
	if err != nil {
		return nil, err
	}
	return &placedFile{im: im, f: f, name: name, dir: dir, sum: sha256.New()}, nil
}

// systemDir is where package sysdisk keeps the disks with agents. Imports put theirs beside them.
func (s *Store) systemDir() string { return filepath.Join(s.CacheDir(), "sysdisk") }

// Adopt implements snapshot.Placer: it sets what the snapshot says from now on.
func (im *importing) Adopt(m *snapshot.Manifest) error {
	st, sent := disk.Stack{}, false
	for _, l := range SnapshotStack(m).Layers {
		// A layer that is not in the stream is not looked for: the store may have another VM's of that name. If the
		// next layer has absorbed it, it is not needed; otherwise disk.Verify misses it. Nothing absorbs the uppermost.
		var name string
		if name, sent = im.layers[l]; sent {
			st.Layers = append(st.Layers, name)
		}
	}
	if !sent {
		return fmt.Errorf("its disk: %w: the uppermost layer is not in the stream", snapshot.ErrIncomplete)
	}
	full, err := im.store.Absolute(st)
	if err != nil {
		return err
	}
	if full, _, err = layersIn(im.coming, full); err != nil {
		return err
	}
	if err := disk.Verify(full); err != nil {
		return fmt.Errorf("its disk: %w", err)
	}
	for _, d := range m.Disks {
		if d.Name == instance.DeviceDisk {
			d.Layers = st.Layers
			m.Disks = []snapshot.Disk{d}
			break
		}
	}
	if err := im.adoptSystem(m); err != nil {
		return err
	}
	text, err := json.Marshal(im.record)
	if err != nil {
		return err
	}
	if im.trust {
		m.Labels[LabelRecord] = string(text)
	} else {
		// Not the labels of a sleep or fork, which are ordered, kept and swept with the VM that they name.
		labels := map[string]string{labelKind: KindNamed, LabelRecord: string(text)}
		if DiskOnly(m) {
			labels[labelKind] = KindDisk
		}
		if note := m.Labels[LabelNote]; note != "" {
			labels[LabelNote] = note
		}
		m.Labels, m.Kernel = labels, im.record.Boot.KernelID
		m.Host = map[string]string{instance.FactsKey: m.Host[instance.FactsKey]}
	}
	im.kept = true
	return errors.Join(im.store.lend(borrowed("", st.Layers)...), im.store.keep(m.ID))
}

// adoptSystem finds the disk that the guest has its agent from.
func (im *importing) adoptSystem(m *snapshot.Manifest) error {
	b := &im.record.Boot
	switch {
	case DiskOnly(m) || b.SystemDisk == "":
		b.SystemDisk = ""
	case im.system != "":
		b.SystemDisk = im.system
	default:
		// Older versions did not send it. A file of that name in this store was made here, from an agent with that
		// hash.
		own := filepath.Join(im.store.systemDir(), filepath.Base(b.SystemDisk))
		if _, err := os.Stat(own); err != nil {
			return fmt.Errorf("%w: the disk that its guest runs its agent from, %.100q, is neither in the stream nor in this store: export it again with this version of drowse, or copy that file from cache/sysdisk of the store that the snapshot comes from", ErrImport, filepath.Base(b.SystemDisk))
		}
		b.SystemDisk = im.store.InStore(own)
	}
	return nil
}

// placedFile is a packed layer, or the disk with the agent, on its way into the store.
type placedFile struct {
	im   *importing
	f    *os.File // nil once discarded
	name string   // in the stream
	dir  string
	sum  hash.Hash
}

// Write implements io.Writer.
func (p *placedFile) Write(b []byte) (int, error) {
	p.sum.Write(b)
	return p.f.Write(b)
}

// Commit implements snapshot.Placement.
func (p *placedFile) Commit() (err error) {
	defer func() { err = errors.Join(err, p.discard()) }()
	content := contentPrefix + hex.EncodeToString(p.sum.Sum(nil))
	if p.name == SystemFile {
		path := filepath.Join(p.dir, content+".erofs")
		p.im.system = p.im.store.InStore(path)
		if err := p.f.Sync(); err != nil {
			return err
		}
		return p.settle(p.f.Name(), path)
	}
	if _, err := p.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if same, err := p.isHere(); err != nil || same {
		p.im.layers[p.name] = p.name
		return err
	}
	path := filepath.Join(p.dir, content)
	p.im.layers[p.name] = content
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	if _, err := p.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	tmp := p.f.Name() + ".layer"
	if err := disk.Unpack(p.im.ctx, p.f, tmp); err != nil {
		return err
	}
	if err = checkImportedLayer(tmp); err == nil {
		err = p.settle(tmp, path)
	}
	return errors.Join(err, removeIfThere(tmp))
}

// checkImportedLayer refuses a layer that could change, or of a disk larger than any here: the index of a disk in
// memory grows with its size, however little was sent.
func checkImportedLayer(path string) error {
	info, err := disk.Inspect(path)
	switch {
	case err != nil:
		return err
	case info.State != disk.StateSealed.String():
		return fmt.Errorf("%w: the layer is %s, not sealed", disk.ErrCorrupt, info.State)
	case info.Size > spec.MaxDiskMiB<<20:
		return fmt.Errorf("%w: the layer is of a disk of %d MiB, at most %d are possible", ErrImport, info.Size>>20, spec.MaxDiskMiB)
	}
	return nil
}

// settle gives a durable file its name, unless that exists: then it has the same content. So does one that another
// import has put there in between; replacing it does no harm.
func (p *placedFile) settle(tmp, path string) error {
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		err = os.Rename(tmp, path)
		if err != nil {
			return fmt.Errorf("placing %s: %w", p.name, err)
		}
	}
	return osfile.SyncDir(p.dir)
}

// isHere reports whether the store has a sealed layer of that name with exactly the content that was sent.
func (p *placedFile) isHere() (bool, error) {
	path := filepath.Join(p.dir, p.name)
	if info, err := disk.Inspect(path); err != nil || info.State != disk.StateSealed.String() {
		return false, nil //nolint:nilerr // what is not there, in use or damaged is another one
	}
	r, w := io.Pipe()
	defer r.Close()
	go func() { w.CloseWithError(disk.Pack(p.im.ctx, w, path)) }()
	return sameContent(r, p.f)
}

func sameContent(a, b io.Reader) (bool, error) {
	p, q := make([]byte, 256<<10), make([]byte, 256<<10)
	for {
		n, err := io.ReadFull(a, p)
		m, err2 := io.ReadFull(b, q)
		end, end2 := errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err2, io.EOF) || errors.Is(err2, io.ErrUnexpectedEOF)
		switch {
		case err != nil && !end:
			return false, err
		case err2 != nil && !end2:
			return false, err2
		case n != m || end != end2 || !bytes.Equal(p[:n], q[:m]):
			return false, nil
		case end:
			return true, nil
		}
	}
}

// Abort implements snapshot.Placement. A file that has its name already stays for the next sweep: another import
// may rely on it.
func (p *placedFile) Abort() error { return p.discard() }

// discard deletes what was received.
func (p *placedFile) discard() error {
	if p.f == nil {
		return nil
	}
	name := p.f.Name()
	err := p.f.Close()
	p.f = nil
	return errors.Join(err, removeIfThere(name))
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
