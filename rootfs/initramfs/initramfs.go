package initramfs

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/u-root/u-root/pkg/cpio"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/rootfs/internal/artifact"
)

const (
	// InitPath, ModulesPath and OrderPath are the archive's paths in the guest. Each line of the file at OrderPath
	// is the name of a file in ModulesPath, in the order to load them.
	InitPath    = "/init"
	ModulesPath = "/modules"
	OrderPath   = "/modules/order"

	// MaxFile bounds each file, in bytes: newc has 32-bit sizes, and a guest must keep all of it in memory.
	MaxFile = 256 << 20
	// MaxTotal bounds all files together, in bytes.
	MaxTotal = 512 << 20
	// MaxModules bounds the number of modules.
	MaxModules = 1024

	// formatVersion is part of every cache name. Raise it when the layout changes.
	formatVersion = "drowse initramfs 1\n"

	cacheFolder = "initramfs"
)

// dirs are the folders in the archive: mount points for the guest program.
var dirs = []string{"dev", "proc", "sys", "run", "newroot", "modules"}

// Spec says what goes into an archive.
type Spec struct {
	Init    string   // path on the host of a statically linked program for the guest
	Modules []string // paths on the host of .ko files, in the order to load them; their base names must differ
}

// ErrBadSpec: a Spec names a file that cannot go into an archive.
var ErrBadSpec = errors.New("bad initramfs")

// Ensure returns the path of the archive for spec in the cache, and makes a missing one: newc cpio (the kernel's
// Documentation/driver-api/early-userspace/buffer-format.rst), not compressed. Equal content gives equal bytes and
// the same path. Any number of calls and processes may do so at the same time. The error wraps ErrBadSpec if the
// spec is wrong.
func Ensure(ctx context.Context, cacheDir string, spec Spec) (string, error) {
	path, err := ensure(ctx, cacheDir, spec)
	if err != nil {
		return "", fmt.Errorf("making an initramfs: %w", err)
	}
	return path, nil
}

func ensure(ctx context.Context, cacheDir string, spec Spec) (string, error) {
	if cacheDir == "" {
		return "", errors.New("no cache folder given")
	}
	files, err := spec.files(ctx)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	_, _ = io.WriteString(h, formatVersion) // a hash never fails
	for _, f := range files {
		fmt.Fprintf(h, "%q %d %s\n", f.name, f.size, f.sum)
	}
	return artifact.Made(cacheDir, cacheFolder, h.Sum(nil), ".cpio", spec.Init, func(f *os.File) error {
		w := bufio.NewWriterSize(f, 1<<20)
		if err := write(ctx, w, files); err != nil {
			return err
		}
		return w.Flush()
	})
}

// file is a regular file of the archive.
type file struct {
	host string // path on the host
	name string // path in the archive, without the leading slash
	mode uint64
	size int64
	sum  string // SHA-256
}

// files checks the spec and returns its files, with hashes. The first is /init.
func (s Spec) files(ctx context.Context) ([]file, error) {
	if s.Init == "" {
		return nil, fmt.Errorf("%w: no init program given", ErrBadSpec)
	}
	if len(s.Modules) > MaxModules {
		return nil, fmt.Errorf("%w: %d modules, more than %d", ErrBadSpec, len(s.Modules), MaxModules)
	}
	files := []file{{host: s.Init, name: InitPath[1:], mode: 0o755}}
	seen := map[string]string{}
	for _, m := range s.Modules {
		base := filepath.Base(m)
		if !strings.HasSuffix(base, ".ko") || strings.ContainsAny(base, "\n\r") {
			return nil, fmt.Errorf("%w: %q is not a module (NAME.ko, not compressed)", ErrBadSpec, m)
		}
		if old, ok := seen[base]; ok {
			return nil, fmt.Errorf("%w: two modules of one name: %s and %s", ErrBadSpec, old, m)
		}
		seen[base] = m
		files = append(files, file{host: m, name: ModulesPath[1:] + "/" + base, mode: 0o644})
	}
	var total int64
	for i := range files {
		f := &files[i]
		info, err := os.Stat(f.host)
		if err != nil {
			return nil, err
		}
		if !info.Mode().IsRegular() || info.Size() == 0 {
			return nil, fmt.Errorf("%w: %s is not a file with content", ErrBadSpec, f.host)
		}
		if total += info.Size(); info.Size() > MaxFile || total > MaxTotal {
			return nil, fmt.Errorf("%w: %s has %d bytes; a file may have %d, all together %d", ErrBadSpec, f.host, info.Size(), int64(MaxFile), int64(MaxTotal))
		}
		if f.sum, f.size, err = artifact.HashFile(ctx, f.host); err != nil {
			return nil, err
		}
		if f.size > MaxFile {
			return nil, fmt.Errorf("%w: %s grew while it was read", ErrBadSpec, f.host)
		}
	}
	return files, nil
}

// write writes the archive. Inode numbers count up from 1, and times, owners and devices are zero.
func write(ctx context.Context, out io.Writer, files []file) error {
	var ino uint64
	w := cpio.Newc.Writer(out)
	put := func(r cpio.Record) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		ino++
		r.Ino, r.NLink = ino, 1
		return w.WriteRecord(r)
	}
	for _, d := range dirs {
		if err := put(cpio.Directory(d, 0o755)); err != nil {
			return err
		}
	}
	// The kernel opens /dev/console for init before anything is mounted on /dev (init/main.c, console_on_rootfs).
	// Numbers from Documentation/admin-guide/devices.txt.
	for _, r := range []cpio.Record{cpio.CharDev("dev/console", 0o600, 5, 1), cpio.CharDev("dev/null", 0o666, 1, 3)} {
		if err := put(r); err != nil {
			return err
		}
	}
	var order bytes.Buffer
	for _, f := range files {
		if err := putFile(put, f); err != nil {
			return err
		}
		if name, ok := strings.CutPrefix(f.name, ModulesPath[1:]+"/"); ok {
			order.WriteString(name + "\n")
		}
	}
	if err := put(cpio.StaticFile(OrderPath[1:], order.String(), 0o644)); err != nil {
		return err
	}
	return cpio.WriteTrailer(w)
}

// putFile copies a file of the host, and fails if the file has changed since it was hashed.
func putFile(put func(cpio.Record) error, f file) error {
	src, err := os.Open(f.host)
	if err != nil {
		return err
	}
	defer src.Close()
	hash := sha256.New()
	err = put(cpio.Record{
		ReaderAt: &hashingReader{io.NewSectionReader(src, 0, f.size), hash},
		Info:     cpio.Info{Name: f.name, Mode: unix.S_IFREG | f.mode, FileSize: uint64(f.size)},
	})
	if err != nil {
		return err
	}
	if hex.EncodeToString(hash.Sum(nil)) != f.sum {
		return fmt.Errorf("%s changed while it was copied", f.host)
	}
	return nil
}

// hashingReader hashes what is read from it. cpio reads it once and in order.
type hashingReader struct {
	io.ReaderAt
	hash io.Writer
}

// ReadAt implements io.ReaderAt.
func (h *hashingReader) ReadAt(p []byte, off int64) (int, error) {
	n, err := h.ReaderAt.ReadAt(p, off)
	_, _ = h.hash.Write(p[:n])
	return n, err
}
