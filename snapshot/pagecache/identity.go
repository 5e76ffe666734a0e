package pagecache

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// identity tells a memory file from all others of the host: its device, inode, time of birth and of the last change
// of its content, and size. Times are in nanoseconds. The birth is 0 where the file system does not know it. A link
// to the file does not change it. The id in a memory file would not do: whoever writes the file chooses the id.
type identity [40]byte

// identify returns the identity of the file of a descriptor or, if it is unix.AT_FDCWD, of a path.
func identify(fd int, path string) (id identity, err error) {
	const want = unix.STATX_BASIC_STATS | unix.STATX_BTIME
	var st unix.Statx_t
	for err = unix.EINTR; errors.Is(err, unix.EINTR); {
		err = unix.Statx(fd, path, unix.AT_EMPTY_PATH|unix.AT_SYMLINK_NOFOLLOW, want, &st)
	}
	if err != nil {
		return id, err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return id, errors.New("it is no regular file")
	}
	le := binary.LittleEndian
	le.PutUint32(id[0:], st.Dev_major)
	le.PutUint32(id[4:], st.Dev_minor)
	le.PutUint64(id[8:], st.Ino)
	if st.Mask&unix.STATX_BTIME != 0 {
		le.PutUint64(id[16:], uint64(st.Btime.Sec*1e9+int64(st.Btime.Nsec)))
	}
	le.PutUint64(id[24:], uint64(st.Mtime.Sec*1e9+int64(st.Mtime.Nsec)))
	le.PutUint64(id[32:], st.Size)
	return id, nil
}

// name returns the name of the cache file. Identities that differ have other names.
func (id identity) name() string {
	sum := sha256.Sum256(id[:])
	return hex.EncodeToString(sum[:16]) + suffix
}

// Name returns the name that the cache file of an open memory file has in the directory of a cache. A process that
// opens cache files for others allows only the names of files that they may read anyway.
func Name(memoryFile *os.File) (string, error) {
	id, err := identityOf(memoryFile)
	if err != nil {
		return "", err
	}
	return id.name(), nil
}

// NameOf is Name for the path of a memory file.
func NameOf(path string) (string, error) {
	id, err := identify(unix.AT_FDCWD, path)
	if err != nil {
		return "", fmt.Errorf("identifying the memory file %s: %w", path, err)
	}
	return id.name(), nil
}

func identityOf(f *os.File) (identity, error) {
	id, err := identify(int(f.Fd()), "")
	if err != nil {
		return id, fmt.Errorf("identifying the memory file %s: %w", f.Name(), err)
	}
	return id, nil
}
