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

// A file is written under another name beside its own and gets that when it is whole. What was
// written of a large one stays when its copy is cut, so that another copy can go on with it.
const (
	// partPrefix begins the names of unfinished files. Files of such names are never copied.
	partPrefix = ".drowse-part-"
	// partDigits is how long the rest of such a name is: hexadecimal.
	partDigits = 24

	// KeepPart is how much of a file there must be, in bytes, for that to stay when its copy is cut.
	KeepPart = 1 << 20
	// partWait is how long a copy waits for another one that writes the same file: the end of one that
	// was cut may come late.
	partWait = 30 * time.Second
	// maxPartTries bounds how often an unfinished file may come and go while it is being opened.
	maxPartTries = 1000
)

// ErrBusy says that another copy writes the same file.
var ErrBusy = errors.New("another copy writes the same file")

// partName is what an unfinished file is called in its directory: the same for each copy of it.
func partName(base string) string {
	sum := sha256.Sum256([]byte(base))
	return partPrefix + hex.EncodeToString(sum[:])[:partDigits]
}

// Marker is the name of a file that a directory has at its top while a tree is copied into it, if
// the copy has made it. base is the last element of the tree's path at its source.
func Marker(base string) string { return partName("tree\x00" + base) }

// Unfinished says of a name's last element that it is one of an unfinished file, or a marker, which no copy has.
func Unfinished(base string) bool {
	rest, ok := strings.CutPrefix(base, partPrefix)
	if !ok || len(rest) != partDigits {
		return false
	}
	_, err := hex.DecodeString(rest)
	return err == nil
}

// part is an unfinished file. Until it is closed nobody else writes to it.
type part struct {
	*os.File
	at   *spot // its own, open until it is closed
	to   *spot // that of the whole file
	kept bool  // it may stay, since it has the name that other copies look for
}

// openPart opens the unfinished file of a large one, alone, and takes over the spot unless it fails. With
// create it is made if need be; without it fails with fs.ErrNotExist if there is none.
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
		f.Close() // whoever had it has finished it, or removed it
	}
	return nil, fmt.Errorf("%w: %s comes and goes", ErrBusy, at.base)
}

// newPart makes an unfinished file that does not stay, and takes over the spot unless it fails.
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

// isAt says that an open file still has a name.
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

// abandon closes the file. It stays if the copy was cut and there is enough of it.
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

// sum is the SHA-256 of the first n bytes of the file of a name.
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

// hashPrefix is the SHA-256 of the first n bytes of a file. It fails with io.ErrUnexpectedEOF if
// there are fewer.
func hashPrefix(ctx context.Context, f io.ReaderAt, n int64) (sum [sha256.Size]byte, err error) {
	h := sha256.New()
	got, err := io.Copy(h, &ctxReader{ctx: ctx, r: io.NewSectionReader(f, 0, n)})
	if err == nil && got < n {
		err = io.ErrUnexpectedEOF
	}
	h.Sum(sum[:0])
	return sum, err
}
