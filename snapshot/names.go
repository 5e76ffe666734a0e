package snapshot

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// MaxManifestBytes bounds the size of a manifest file.
const MaxManifestBytes = manifestHeader + MaxManifestJSON + MaxStateBytes + manifestSum

// ParseManifest checks the content of a manifest file and returns the manifest. It fails with ErrIncomplete,
// ErrForeign, ErrVersion or ErrCorrupt.
func ParseManifest(body []byte) (*Manifest, error) {
	m, _, err := decodeManifest(body)
	return m, err
}

// IsFile reports whether a file of this name can be part of a snapshot.
func IsFile(name string) bool { return name == ManifestName || isMemory(name) }

func isMemory(name string) bool {
	id, linked := strings.CutPrefix(name, MemoryName+"-")
	return name == MemoryName || linked && checkHex("id", id) == nil
}

// LinkOf reports whether a snapshot may have the file before of an earlier snapshot under the name after.
func LinkOf(before, after string) bool {
	return isMemory(before) && isMemory(after) && after != MemoryName && (before == MemoryName || before == after)
}

// OpenFiles opens the files of the snapshot in dir for reading, without looking at their content. open opens a file for
// reading with further flags of open(2). The caller closes them, also after an error.
func OpenFiles(dir string, open func(path string, flags int) (*os.File, error)) (files []*os.File, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			err = errors.Join(ErrNotFound, err)
		}
		return nil, err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() || !IsFile(e.Name()) {
			continue
		}
		if len(files) > MaxFiles {
			break
		}
		f, err := open(filepath.Join(dir, e.Name()), unix.O_NOFOLLOW|unix.O_NONBLOCK)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}
