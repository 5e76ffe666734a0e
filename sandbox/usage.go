package sandbox

import (
	"io/fs"
	"path/filepath"
	"syscall"
)

// diskUsage is what a file or the files of a tree take on disk, in bytes: all, and of
// that what would be free without them, which is not so for files that have other names
// as well. What cannot be read counts nothing.
func diskUsage(path string) (all, exclusive int64) {
	_ = filepath.WalkDir(path, func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if info, err := d.Info(); err == nil {
			if st, ok := info.Sys().(*syscall.Stat_t); ok {
				const block = 512 // of st_blocks, stat(2)
				all += st.Blocks * block
				if d.IsDir() || st.Nlink == 1 {
					exclusive += st.Blocks * block
				}
			}
		}
		return nil
	})
	return all, exclusive
}
