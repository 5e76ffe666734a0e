package treetar

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// A file is written under another name beside its own, and renamed when it is whole. If the copy is cut, the
// unfinished part of a large file stays, so that another copy can continue it.
const (
	// partPrefix is the prefix of the names of unfinished files. Files with such names are never copied.
	partPrefix = ".drowse-part-"
	// partDigits is the length of the rest of such a name: hexadecimal digits.
	partDigits = 24

	// KeepPart is the least size, in bytes, of an unfinished file that stays when its copy is cut.
	KeepPart = 1 << 20
	// partWait is how long a copy waits for another one that writes the same file: a cut copy may end late.
	partWait = 30 * time.Second
	// maxPartTries bounds how often an unfinished file may come and go while it is being opened.
	maxPartTries = 1000
)

// ErrBusy says that another copy writes the same file.
var ErrBusy = errors.New("another copy writes the same file")

// partName returns the name of an unfinished file in its directory, which is the same for each copy of it.
func partName(base string) string {
	sum := sha256.Sum256([]byte(base))
	return partPrefix + hex.EncodeToString(sum[:])[:partDigits]
}

// Marker returns the name of a file at the top of a tree that a copy has made, while it is incomplete. base is the
// last element of the tree's path at its source.
func Marker(base string) string { return partName("tree\x00" + base) }

// Unfinished reports whether base, the last element of a name, is that of an unfinished file or a marker. No copy
// contains them.
func Unfinished(base string) bool {
	rest, ok := strings.CutPrefix(base, partPrefix)
	if !ok || len(rest) != partDigits {
		return false
	}
	_, err := hex.DecodeString(rest)
	return err == nil
}

// part is an unfinished file. No other copy writes to it until it is closed.
type part struct {
	*os.File
	at   *spot // the part's name; open until it is closed
	to   *spot // the whole file's name
	kept bool  // it may stay, since other copies look for its name
}

// openPart opens and locks the unfinished file of a large one. It takes over the spot unless it fails. With create
// it makes a missing file; without, the error is then fs.ErrNotExist.
func openPart(ctx context.Context, to *spot, create bool) (*part, error) {
	at := to.beside(partName(to.base))
	flags := os.O_RDWR
	if create {
		flags |= os.O_CREATE
	}
	ctx, cancel := context.WithTimeoutCause(ctx, partWait, ErrBusy)
	defer cancel()
	for range maxPartTries {
		if st, err := at.stat(); err == nil && !isFile(&st) {
			return nil, fmt.Errorf("%s is not a file: %w", at.base, fs.ErrExist)
		}
		f, err := at.open(flags, 0o600)
		if err != nil {
			return nil, err
		}
		if err := osfile.Lock(ctx, f, osfile.Exclusive); err != nil {
			f.Close()
			return nil, err
		}
		if isAt(f, at) {
			return &part{File: f, at: at, to: to, kept: true}, nil
		}
		f.Close() // the copy that held it has finished or removed it
	}
	return nil, fmt.Errorf("%w: %s comes and goes", ErrBusy, at.base)
}

// newPart makes an unfinished file that does not stay. It takes over the spot unless it fails.
func newPart(to *spot) (*part, error) {
	var random [partDigits / 2]byte
	_, _ = rand.Read(random[:]) // never fails
	at := to.beside(partPrefix + hex.EncodeToString(random[:]))
	f, err := at.open(os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	return &part{File: f, at: at, to: to}, nil
}

// isAt reports whether an open file still has the name at.
func isAt(f *os.File, at *spot) bool {
	there, err := at.stat()
	if err != nil {
		return false
	}
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	return err == nil && sameFile(&there, &st)
}

// commit gives the file its name and closes it.
func (p *part) commit() error {
	err := p.at.rename(p.to)
	if err != nil {
		_ = p.at.remove()
	}
	return errors.Join(err, p.close())
}

// abandon closes the file. The file stays if the copy was cut and the file is large enough.
func (p *part) abandon(cut bool) {
	if fi, err := p.Stat(); !cut || !p.kept || err != nil || fi.Size() < KeepPart {
		_ = p.at.remove()
	}
	_ = p.close()
}

func (p *part) close() error {
	p.to.close()
	return p.Close()
}

// sum returns the SHA-256 of a file's first n bytes.
func (b *beneath) sum(ctx context.Context, name string, n int64) (sum [sha256.Size]byte, err error) {
	s, err := b.find(name)
	if err != nil {
		return sum, err
	}
	defer s.close()
	f, err := s.open(os.O_RDONLY, 0)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	return hashPrefix(ctx, f, n)
}

// hashPrefix returns the SHA-256 of a file's first n bytes. The error is io.ErrUnexpectedEOF if it has fewer.
func hashPrefix(ctx context.Context, f io.ReaderAt, n int64) (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	got, err := io.Copy(h, &ctxReader{ctx: ctx, r: io.NewSectionReader(f, 0, n)})
	if err == nil && got < n {
		err = io.ErrUnexpectedEOF
	}
	h.Sum(sum[:0])
	return sum, err
}
