package osfile

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// ErrShared means that users other than its owner may read a file.
var ErrShared = errors.New("others may read it")

// ReadPrivate reads a file that only its owner may read, at most limit bytes of it.
func ReadPrivate(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if mode := st.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("%s: %w (mode %#o)", path, ErrShared, mode)
	}
	return io.ReadAll(io.LimitReader(f, limit))
}
