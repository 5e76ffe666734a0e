package jail

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// passedFS is the file system of the child: the keeper has passed some of the files, and opens or changes the others
// on request.
type passedFS struct {
	ask func(fileOrder) (fileInfo, []*os.File, error)

	mu     sync.Mutex
	passed map[string][]*os.File
	known  map[string]*fileInfo // nil for what does not exist
}

var _ osfile.FS = (*passedFS)(nil)

// add takes over descriptors under names. A name may have several.
func (p *passedFS) add(names []string, files []*os.File) error {
	if len(names) != len(files) {
		return errors.Join(errors.New("names and descriptors differ in number"), closeAll(files))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.passed == nil {
		p.passed = map[string][]*os.File{}
	}
	for i, n := range names {
		p.passed[n] = append(p.passed[n], files[i])
	}
	return nil
}

// know spares asking for names once each.
func (p *passedFS) know(all map[string]*fileInfo) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known = all
}

// first returns what is known of a name, at the first look at it.
func (p *passedFS) first(name string) (i *fileInfo, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	i, known = p.known[name]
	delete(p.known, name)
	return i, known
}

// take returns a descriptor that was passed under a name, once; nil if there is none.
func (p *passedFS) take(name string) *os.File {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := p.passed[name]
	if len(list) == 0 {
		return nil
	}
	p.passed[name] = list[1:]
	return list[0]
}

// close closes what was not taken.
func (p *passedFS) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, list := range p.passed {
		for _, f := range list {
			f.Close()
		}
	}
	p.passed = nil
}

// passName is the name under which a file is passed that is opened with flags.
func passName(name string, flags int) string {
	if flags&unix.O_ACCMODE == os.O_RDONLY {
		return name
	}
	return "rw:" + name
}

func (p *passedFS) OpenFile(name string, flag int, _ fs.FileMode) (osfile.File, error) {
	name = filepath.Clean(name)
	if flag&os.O_CREATE == 0 {
		if f := p.take(passName(name, flag)); f != nil {
			return named(f, name)
		}
		if i, known := p.first(name); known && i == nil {
			return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
		}
	}
	_, files, err := p.ask(fileOrder{Op: fileOpen, Name: name, Flags: flag})
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	if len(files) != 1 {
		return nil, errors.Join(&fs.PathError{Op: "open", Path: name, Err: errNoFile}, closeAll(files))
	}
	return named(files[0], name)
}

var errNoFile = errors.New("the keeper has answered without the file")

// named gives a passed file the name by which it was asked for: a descriptor has none.
func named(f *os.File, name string) (osfile.File, error) {
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err = errors.Join(err, f.Close()); err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return osfile.NewFile(os.NewFile(uintptr(fd), name)), nil
}

func closeAll(files []*os.File) error {
	var errs []error
	for _, f := range files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// do asks for something that needs no answer.
func (p *passedFS) do(op, name, to string) error {
	o := fileOrder{Op: op, Name: filepath.Clean(name)}
	if to != "" {
		o.To = filepath.Clean(to)
	}
	_, files, err := p.ask(o)
	_ = closeAll(files)
	switch {
	case err == nil:
		return nil
	case to != "":
		return &os.LinkError{Op: op, Old: name, New: to, Err: err}
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}

func (p *passedFS) Rename(oldname, newname string) error { return p.do(fileRename, oldname, newname) }
func (p *passedFS) RenameNew(oldname, newname string) error {
	return p.do(fileRenameNew, oldname, newname)
}
func (p *passedFS) Link(oldname, newname string) error     { return p.do(fileLink, oldname, newname) }
func (p *passedFS) Remove(name string) error               { return p.do(fileRemove, name, "") }
func (p *passedFS) RemoveAll(name string) error            { return p.do(fileRemoveAll, name, "") }
func (p *passedFS) Mkdir(name string, _ fs.FileMode) error { return p.do(fileMkdir, name, "") }
func (p *passedFS) SyncDir(name string) error              { return p.do(fileSyncDir, name, "") }

// Exchange and ReadDir are of no use to a VM.
func (p *passedFS) Exchange(a, b string) error {
	return &os.LinkError{Op: "exchange", Old: a, New: b, Err: unix.EACCES}
}

func (p *passedFS) ReadDir(name string) ([]fs.DirEntry, error) {
	return nil, &fs.PathError{Op: "readdir", Path: name, Err: unix.EACCES}
}

func (p *passedFS) Stat(name string) (fs.FileInfo, error) {
	name = filepath.Clean(name)
	if i, known := p.first(name); known && i != nil {
		return stat{*i, filepath.Base(name)}, nil
	}
	i, files, err := p.ask(fileOrder{Op: fileStat, Name: name})
	_ = closeAll(files)
	if err != nil {
		return nil, &fs.PathError{Op: "stat", Path: name, Err: err}
	}
	return stat{i, filepath.Base(name)}, nil
}

// stat is a fileInfo as fs.FileInfo.
type stat struct {
	i    fileInfo
	name string
}

func (s stat) Name() string       { return s.name }
func (s stat) Size() int64        { return s.i.Size }
func (s stat) ModTime() time.Time { return s.i.ModTime }
func (s stat) IsDir() bool        { return s.i.Dir }
func (s stat) Sys() any           { return &syscall.Stat_t{Dev: s.i.Device, Ino: s.i.Inode, Size: s.i.Size} }
func (s stat) Mode() fs.FileMode {
	if s.i.Dir {
		return fs.ModeDir | 0o700
	}
	return 0o600
}

// Lock has the keeper lock the directory. The keeper holds the lock until the capture ends.
func (p *passedFS) Lock(name string) (io.Closer, error) {
	if err := p.do(fileLock, name, ""); err != nil {
		return nil, err
	}
	return nothingToClose{}, nil
}

type nothingToClose struct{}

func (nothingToClose) Close() error { return nil }

func (p *passedFS) Free(name string) (uint64, error) {
	i, files, err := p.ask(fileOrder{Op: fileFree, Name: filepath.Clean(name)})
	_ = closeAll(files)
	if err != nil {
		return 0, &fs.PathError{Op: "statfs", Path: name, Err: err}
	}
	return i.Free, nil
}

// fileTimeout is how long the child waits for the keeper to open a file or to change a name. A sync of a directory on
// a busy disk takes seconds.
const fileTimeout = 5 * time.Minute

func fileContext() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), fileTimeout)
}
