package fakeguest

import (
	"archive/tar"
	"context"
	"errors"
	"io"
	"io/fs"
	"path"
	"strings"
	"syscall"
	"testing/fstest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
	"github.com/drowse-vm/drowse/guest/internal/flow"
)

// describe returns the agent's description of a file.
func describe(fi fs.FileInfo) *agentpb.FileInfo {
	mode := uint32(fi.Mode().Perm()) | syscall.S_IFREG
	if fi.IsDir() {
		mode = uint32(fi.Mode().Perm()) | syscall.S_IFDIR
	}
	return &agentpb.FileInfo{Name: fi.Name(), Size: fi.Size(), Mode: mode, MtimeNanos: fi.ModTime().UnixNano()}
}

func (a agent) Stat(_ context.Context, m *agentpb.StatRequest) (*agentpb.FileInfo, error) {
	at, err := place(m.Path)
	if err != nil {
		return nil, err
	}
	fi, err := a.g.Files().Stat(at)
	if err != nil {
		return nil, err
	}
	return describe(fi), nil
}

func (a agent) ReadDir(_ context.Context, m *agentpb.ReadDirRequest) (*agentpb.ReadDirResponse, error) {
	at, err := place(m.Path)
	if err != nil {
		return nil, err
	}
	all, err := a.g.Files().ReadDir(at) // sorted by name
	if err != nil {
		return nil, err
	}
	out := &agentpb.ReadDirResponse{}
	for _, e := range all {
		if m.After != "" && e.Name() <= m.After {
			continue
		}
		if out.More = len(out.Entries) == 256; out.More {
			break
		}
		fi, err := e.Info()
		if err != nil {
			return nil, err
		}
		out.Entries = append(out.Entries, describe(fi))
	}
	return out, nil
}

func (a agent) Mkdir(_ context.Context, m *agentpb.MkdirRequest) (*agentpb.Empty, error) {
	at, err := place(m.Path)
	if err != nil {
		return nil, err
	}
	mode := fs.FileMode(m.Mode & 0o777)
	if mode == 0 {
		mode = 0o755
	}
	return &agentpb.Empty{}, a.g.change(func(files fstest.MapFS) error {
		if fi, err := files.Stat(at); err == nil {
			if m.Parents && fi.IsDir() {
				return nil
			}
			return &fs.PathError{Op: "mkdir", Path: m.Path, Err: fs.ErrExist}
		}
		return put(files, at, &fstest.MapFile{Mode: fs.ModeDir | mode, ModTime: time.Now()}, m.Parents)
	})
}

func (a agent) Remove(_ context.Context, m *agentpb.RemoveRequest) (*agentpb.Empty, error) {
	at, err := place(m.Path)
	if err != nil {
		return nil, err
	}
	return &agentpb.Empty{}, a.g.change(func(files fstest.MapFS) error {
		if _, err := files.Stat(at); err != nil {
			return err
		}
		below := below(files, at)
		if len(below) > 0 && !m.Recursive {
			return &fs.PathError{Op: "remove", Path: m.Path, Err: syscall.ENOTEMPTY}
		}
		for _, name := range append(below, at) {
			delete(files, name)
		}
		return nil
	})
}

func (a agent) Rename(_ context.Context, m *agentpb.RenameRequest) (*agentpb.Empty, error) {
	from, err := place(m.From)
	to, terr := place(m.To)
	if err := errors.Join(err, terr); err != nil {
		return nil, err
	}
	return &agentpb.Empty{}, a.g.change(func(files fstest.MapFS) error {
		f := files[from]
		switch {
		case f == nil:
			return &fs.PathError{Op: "rename", Path: m.From, Err: fs.ErrNotExist}
		case from == to:
			return nil
		case strings.HasPrefix(to, from+"/"):
			return &fs.PathError{Op: "rename", Path: m.To, Err: syscall.EINVAL}
		case len(below(files, to)) > 0:
			return &fs.PathError{Op: "rename", Path: m.To, Err: syscall.ENOTEMPTY}
		}
		if f.Mode.IsDir() {
			delete(files, to)
		}
		if err := put(files, to, f, false); err != nil {
			return err
		}
		delete(files, from)
		for _, name := range below(files, from) {
			files[to+strings.TrimPrefix(name, from)] = files[name]
			delete(files, name)
		}
		return nil
	})
}

// below returns the names below a directory.
func below(files fstest.MapFS, dir string) (names []string) {
	for name := range files {
		if strings.HasPrefix(name, dir+"/") || dir == "." {
			names = append(names, name)
		}
	}
	return names
}

// Transfer implements agentpb.AgentService.
func (a agent) Transfer(ctx context.Context, stream agentpb.Agent_TransferServer) error {
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t := flow.NewPipe(ctx, ctx, func(data []byte) error {
		return stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Data{Data: data}})
	}, func(n uint64) error {
		return stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Ack{Ack: n}})
	})
	go func() { cancel(receive(stream, t)) }()
	var done *agentpb.TransferDone
	switch m := first.Msg.(type) {
	case *agentpb.TransferRequest_Read:
		done, err = a.read(t, m.Read)
	case *agentpb.TransferRequest_Write:
		var data []byte
		if data, err = io.ReadAll(t); err == nil {
			done, err = &agentpb.TransferDone{Bytes: int64(len(data)), Entries: 1}, a.g.write(m.Write, data)
		}
	case *agentpb.TransferRequest_Pack:
		done, err = a.pack(t, m.Pack)
	case *agentpb.TransferRequest_Unpack:
		done, err = a.unpack(t, m.Unpack)
	default:
		err = status.Error(codes.InvalidArgument, agentpb.NoTransfer)
	}
	if err != nil {
		return toStatus(err)
	}
	return stream.Send(&agentpb.TransferResponse{Msg: &agentpb.TransferResponse_Done{Done: done}})
}

// receive handles the host's messages in a transfer. It always returns an error.
func receive(stream agentpb.Agent_TransferServer, t *flow.Pipe) error {
	for ended := false; ; {
		m, err := stream.Recv()
		if err != nil {
			return err
		}
		switch m := m.Msg.(type) {
		case *agentpb.TransferRequest_Ack:
			err = t.Ack(m.Ack)
		case *agentpb.TransferRequest_Data:
			if ended || !t.Put(m.Data) {
				err = flow.ErrProtocol
			}
		case *agentpb.TransferRequest_End:
			if !ended {
				t.End()
			}
			ended = true
		}
		if err != nil {
			return err
		}
	}
}

func (a agent) read(t *flow.Pipe, m *agentpb.ReadFile) (*agentpb.TransferDone, error) {
	data, err := a.g.ReadFile(m.Path)
	if err != nil {
		return nil, err
	}
	if m.Offset < 0 || m.Length < 0 {
		return nil, &fs.PathError{Op: "read", Path: m.Path, Err: syscall.EINVAL}
	}
	data = data[min(m.Offset, int64(len(data))):]
	if m.Length > 0 {
		data = data[:min(m.Length, int64(len(data)))]
	}
	n, err := t.Write(data)
	return &agentpb.TransferDone{Bytes: int64(n), Entries: 1}, err
}

// pack sends a file or a tree as a tar stream. The names in it start with the last element of its path.
func (a agent) pack(t *flow.Pipe, m *agentpb.Pack) (*agentpb.TransferDone, error) {
	root, err := place(m.Path)
	if err != nil {
		return nil, err
	}
	files, base := a.g.Files(), path.Base(root)
	if root == "." {
		base = "root"
	}
	done := &agentpb.TransferDone{}
	w := tar.NewWriter(t)
	err = fs.WalkDir(files, root, func(at string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if err != nil {
			return err
		}
		h, err := tar.FileInfoHeader(fi, "")
		if err != nil {
			return err
		}
		var data []byte
		if !fi.IsDir() {
			data = files[at].Data
		}
		if root != "." {
			at = strings.TrimPrefix(at, root)
		}
		if h.Name = path.Join(base, at); fi.IsDir() {
			h.Name += "/"
		}
		if err := w.WriteHeader(h); err != nil || fi.IsDir() {
			return err
		}
		n, err := w.Write(data)
		done.Bytes, done.Entries = done.Bytes+int64(n), done.Entries+1
		return err
	})
	if err == nil {
		err = w.Close()
	}
	return done, err
}

// unpack makes the tree of a tar stream. It skips all but directories and regular files.
func (a agent) unpack(t *flow.Pipe, m *agentpb.Unpack) (*agentpb.TransferDone, error) {
	root, err := place(m.Path)
	if err != nil {
		return nil, err
	}
	done := &agentpb.TransferDone{}
	r := tar.NewReader(t)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			_, err = io.Copy(io.Discard, t) // the padding
			return done, err
		}
		if err != nil {
			return nil, err
		}
		at := path.Join(root, path.Clean("/"+h.Name))
		f := &fstest.MapFile{Mode: h.FileInfo().Mode(), ModTime: h.ModTime}
		switch h.Typeflag {
		case tar.TypeDir:
		case tar.TypeReg:
			if f.Data, err = io.ReadAll(r); err != nil {
				return nil, err
			}
		default:
			continue
		}
		if err := a.g.change(func(files fstest.MapFS) error { return put(files, at, f, true) }); err != nil {
			return nil, err
		}
		done.Bytes, done.Entries = done.Bytes+int64(len(f.Data)), done.Entries+1
	}
}

// Drop implements agentpb.AgentService.
func (a agent) Drop(_ context.Context, m *agentpb.DropRequest) (*agentpb.DropResponse, error) {
	r := &agentpb.DropResponse{}
	if m.Look {
		r.NowNanos = time.Now().UnixNano()
	}
	for _, p := range m.Paths {
		at, err := place(p.Path)
		if err != nil {
			return nil, err
		}
		is := &agentpb.DroppedPath{State: agentpb.DropAbsent}
		r.Paths = append(r.Paths, is)
		err = a.g.change(func(files fstest.MapFS) error {
			f, in := files[at], below(files, at)
			switch {
			case f != nil && !f.Mode.IsDir():
				is.State = agentpb.DropFile
			case len(in) > 0:
				is.State = agentpb.DropDirectory
			case f != nil:
				is.State = agentpb.DropEmpty
			}
			for _, name := range in {
				if !m.Look && (p.BeforeNanos == 0 || files[name].ModTime.UnixNano() < p.BeforeNanos) {
					delete(files, name)
					is.Entries++
				}
			}
			return nil
		})
		if err != nil {
			return nil, err
		}
	}
	return r, nil
}
