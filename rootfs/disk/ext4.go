package disk

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/internal/osfile"
)

const (
	// DefaultExt4Size is the default size of a sandbox's writable disk, in bytes.
	DefaultExt4Size = 8 << 30
	// MinExt4Size is the smallest disk that FormatExt4 makes: room for the journal and some files.
	MinExt4Size = 16 << 20
	// Ext4Label is the volume label of the file system.
	Ext4Label = "drowse-rw"

	// templateRevision is part of a template's name. Raise it when ext4Args or ext4Config change.
	templateRevision = 1
)

// ext4Config replaces /etc/mke2fs.conf, so that every host makes the same file system.
const ext4Config = `[defaults]
	base_features = none
	enable_periodic_fsck = 0
	blocksize = 4096
	inode_size = 256
	inode_ratio = 16384
	reserved_ratio = 0
[fs_types]
	ext4 = {
	}
	drowse = {
	}
`

// ext4Args returns the options of mkfs.ext4 for a disk of size bytes. They give a guest, whose kernel may be slow,
// little to do when it mounts and writes:
//
//   - No metadata_csum: the guest need not checksum 4 KiB for each metadata block that it writes. uninit_bg keeps
//     checksums of the group descriptors, and with them the flag "inode table is zeroed". mkfs sets that flag for
//     every group because it discards a sparse file first. So no guest thread zeroes tables (ext4lazyinit) after
//     the first mount.
//   - A small journal: 16 MiB is 30 s of busy metadata. A guest rewrites the journal constantly, so every
//     snapshot carries it again.
//   - No resize_inode: it reserves tables for growing while mounted, and nothing grows then.
func ext4Args(raw, label string, size int64) []string {
	journal := int64(16)
	if size < 256<<20 {
		journal = 4 // MiB; the least that ext4 takes
	}
	return []string{
		"-q", "-F", "-t", "ext4", "-T", "drowse", "-L", label, "-b", "4096", "-I", "256", "-m", "0",
		"-O", "none,has_journal,ext_attr,dir_index,filetype,extent,flex_bg,sparse_super,large_file,huge_file,uninit_bg,dir_nlink,extra_isize",
		"-J", "size=" + strconv.FormatInt(journal, 10),
		"-E", "discard,root_owner=0:0",
		raw, strconv.FormatInt(size/BlockSize, 10),
	}
}

// FormatExt4 makes a new disk in the file path that holds an empty ext4 of size bytes (0: DefaultExt4Size) with
// the label Ext4Label. The file system itself is a sealed layer, the template. FormatExt4 makes it once for each
// size under cacheDir with mkfs.ext4, and all disks share it, so a new disk costs one small file. All disks of a
// size have the same file-system UUID; mount by device or label. The template must stay as long as a disk refers
// to it.
func FormatExt4(ctx context.Context, cacheDir, path string, size int64) (Stack, error) {
	template, err := Ext4Template(ctx, cacheDir, size)
	if err != nil {
		return Stack{}, err
	}
	return Fork(path, template, 0)
}

// Ext4Template returns the template of FormatExt4 for a size, and makes it if it does not exist.
func Ext4Template(ctx context.Context, cacheDir string, size int64) (Stack, error) {
	size = cmp.Or(size, DefaultExt4Size)
	// Templates of different hosts differ, and a disk from another host brings its own. So each has a unique name.
	prefix := filepath.Join(cacheDir, fmt.Sprintf("ext4-%d-%d-", templateRevision, size))
	if s, ok, err := existing(prefix); ok || err != nil {
		return s, err
	}
	if err := os.MkdirAll(cacheDir, 0o700); err != nil {
		return Stack{}, fmt.Errorf("format ext4: %w", err)
	}
	lock, err := osfile.OpenLocked(ctx, filepath.Join(cacheDir, templateLock), os.O_RDWR|os.O_CREATE, 0o600, osfile.Exclusive)
	if err != nil {
		return Stack{}, fmt.Errorf("format ext4: %w", err)
	}
	defer lock.Close()
	if s, ok, err := existing(prefix); ok || err != nil { // another process was faster
		return s, err
	}
	var random [8]byte
	rand.Read(random[:]) // never fails
	return makeTemplate(ctx, cacheDir, prefix+hex.EncodeToString(random[:])+templateSuffix, size)
}

const (
	templateSuffix = ".layer"
	templateLock   = ".ext4.lock"
)

// existing returns a template whose path begins with prefix, if there is one. It fails if that is damaged.
func existing(prefix string) (s Stack, ok bool, err error) {
	entries, err := os.ReadDir(filepath.Dir(prefix))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return Stack{}, false, fmt.Errorf("format ext4: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), filepath.Base(prefix)) && strings.HasSuffix(e.Name(), templateSuffix) {
			s.Layers = []string{filepath.Join(filepath.Dir(prefix), e.Name())}
			break
		}
	}
	if len(s.Layers) == 0 {
		return Stack{}, false, nil
	}
	if err = Verify(s); err != nil {
		return Stack{}, false, fmt.Errorf("ext4 template: %w (if no disk uses it, delete it and it is made anew)", err)
	}
	return s, true, nil
}

func makeTemplate(ctx context.Context, cacheDir, path string, size int64) (s Stack, err error) {
	dir, err := os.MkdirTemp(cacheDir, ".mkfs-")
	if err != nil {
		return Stack{}, fmt.Errorf("format ext4: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	raw := filepath.Join(dir, "raw")
	if err := FormatRaw(ctx, raw, Ext4Label, size); err != nil {
		return Stack{}, err
	}
	return Import(ctx, path, raw)
}

// FormatRaw makes a sparse raw file of size bytes with an empty ext4 in it, as FormatExt4 makes it, with a label
// of at most 16 bytes. It overwrites an existing file and syncs nothing. During the call it overwrites, and then
// removes, the file mke2fs.conf in the same directory.
func FormatRaw(ctx context.Context, raw, label string, size int64) (err error) {
	if err := checkSize(size); err != nil {
		return fmt.Errorf("format ext4: %w", err)
	}
	if size < MinExt4Size {
		return fmt.Errorf("format ext4: %w: %d bytes; the least is %d", ErrSize, size, int64(MinExt4Size))
	}
	tool, err := findMkfs(mkfsNames)
	if err != nil {
		return err
	}
	conf := filepath.Join(filepath.Dir(raw), "mke2fs.conf")
	if err := os.WriteFile(conf, []byte(ext4Config), 0o600); err != nil {
		return fmt.Errorf("format ext4: %w", err)
	}
	defer func() { err = errors.Join(err, os.Remove(conf)) }()
	if err := os.WriteFile(raw, nil, 0o600); err != nil {
		return fmt.Errorf("format ext4: %w", err)
	}
	if err := os.Truncate(raw, size); err != nil {
		return fmt.Errorf("format ext4: %w", err)
	}
	cmd := exec.CommandContext(ctx, tool, ext4Args(raw, label, size)...)
	cmd.Env = append(os.Environ(), "MKE2FS_CONFIG="+conf, "LC_ALL=C")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("format ext4: %s: %w: %s", tool, err, bytes.TrimSpace(out))
	}
	return nil
}

// mkfsNames are the places of mkfs.ext4: in PATH, or where Debian puts it, which is not in every user's PATH.
var mkfsNames = []string{"mkfs.ext4", "/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"}

func findMkfs(names []string) (string, error) { return findTool("format ext4", names) }

// findTool finds a program of e2fsprogs under one of its names.
func findTool(doing string, names []string) (string, error) {
	for _, name := range names {
		if p, err := exec.LookPath(name); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s: %s is missing: %w; install it with: apt-get install e2fsprogs", doing, filepath.Base(names[0]), exec.ErrNotFound)
}
