package snapshot

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// Usage says what snapshots take on disk. Amounts are in bytes.
type Usage struct {
	Snapshots []SnapshotUsage
	// Bytes is what all files of the snapshots take, those that several have
	// counted once.
	Bytes int64
	// GarbageBytes is how much of that are frames and leaves that none of the
	// snapshots refers to, in files that nobody else has. Compact of the
	// snapshots that have such a file frees it.
	GarbageBytes int64
}

// SnapshotUsage says what one snapshot takes.
type SnapshotUsage struct {
	Dir string
	// Bytes is what its files take: ExclusiveBytes in files that only it has,
	// which are freed when it is removed, and SharedBytes in files that others
	// have as well, given to Usage or not.
	Bytes, ExclusiveBytes, SharedBytes int64
	// NeededBytes is the length of the frames, of the index and of the manifest
	// that the snapshot refers to, in all its files: about what it would take
	// after Compact.
	NeededBytes int64
}

// inode is a file that snapshots share.
type inode struct {
	blocks, size int64
	links, found uint64
	// needed are the extents that snapshots refer to, by offset, and leaves
	// those of them that are leaves whose frames have been counted already.
	needed map[int64]int64
	leaves map[int64]bool
}

type inodeKey struct{ dev, ino uint64 }

// UsageOf looks at the snapshots in dirs together: sizes are those of the blocks
// that the file system has allocated, and files are told apart by their inodes.
// To find garbage it reads the leaves of all snapshots, each once, and keeps
// about 50 bytes for each frame in memory. It fails like Open, for the first
// snapshot that it cannot read, or with the context's error.
func UsageOf(ctx context.Context, dirs ...string) (*Usage, error) {
	u := &Usage{}
	inodes := map[inodeKey]*inode{}
	for _, dir := range dirs {
		su, err := addUsage(ctx, dir, inodes)
		if err != nil {
			return nil, fmt.Errorf("measuring snapshot %s: %w", dir, err)
		}
		u.Snapshots = append(u.Snapshots, su)
	}
	for _, in := range inodes {
		u.Bytes += in.blocks
		if in.needed == nil || in.links > in.found {
			continue // a manifest, or somebody else may need the rest
		}
		free := in.size
		for _, n := range in.needed {
			free -= n
		}
		u.GarbageBytes += max(0, free)
	}
	return u, nil
}

// blockBytes is the unit of st_blocks, see inode(7).
const blockBytes = 512

func lookup(f *os.File, inodes map[inodeKey]*inode) (*inode, error) {
	var st unix.Stat_t
	rc, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	if cerr := rc.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &st) }); cerr != nil || err != nil {
		return nil, &os.PathError{Op: "fstat", Path: f.Name(), Err: cmp.Or(err, cerr)}
	}
	key := inodeKey{st.Dev, st.Ino}
	in := inodes[key]
	if in == nil {
		in = &inode{}
		inodes[key] = in
	}
	in.blocks, in.size, in.links = st.Blocks*blockBytes, st.Size, st.Nlink
	in.found++
	return in, nil
}

func addUsage(ctx context.Context, dir string, inodes map[inodeKey]*inode) (SnapshotUsage, error) {
	su := SnapshotUsage{Dir: dir}
	s, err := Open(dir)
	if err != nil {
		return su, err
	}
	defer s.Close()
	manifest, err := os.Open(filepath.Join(dir, ManifestName))
	if err != nil {
		return su, err
	}
	defer manifest.Close()
	byNumber := map[uint32]*inode{}
	for i, f := range append(slices.Clone(s.files), manifest) {
		in, err := lookup(f, inodes)
		if err != nil {
			return su, err
		}
		su.Bytes += in.blocks
		// The file is ours alone if it has no name elsewhere.
		if in.links <= 1 {
			su.ExclusiveBytes += in.blocks
		} else {
			su.SharedBytes += in.blocks
		}
		if f == manifest {
			su.NeededBytes += in.size
			continue
		}
		if in.needed == nil {
			in.needed, in.leaves = map[int64]int64{}, map[int64]bool{}
		}
		mf := &s.manifest.Memory.Files[i]
		byNumber[mf.Number] = in
		in.needed[0] = fileHeader
		su.NeededBytes += int64(mf.FrameBytes + mf.LeafBytes)
	}
	su.NeededBytes += fileHeader + s.manifest.rootBytes()
	own := s.memory.files[len(s.memory.files)-1]
	byNumber[own.number].needed[own.root] = s.manifest.rootBytes()
	return su, s.mark(ctx, byNumber)
}

// mark notes what the index refers to in each file.
func (s *Snapshot) mark(ctx context.Context, files map[uint32]*inode) error {
	var l Leaf
	buf := make([]byte, maxLeaf)
	for c := range s.memory.Chunks() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		r := s.memory.ref(c)
		in := files[r.file]
		if in == nil || in.leaves[r.offset] {
			continue // all zeros, or another snapshot has the same leaf
		}
		if _, err := s.memory.readLeaf(c, &l, buf); err != nil {
			return err
		}
		in.leaves[r.offset] = true
		in.needed[r.offset] = int64(r.length())
		for i := range l.frames {
			f := &l.frames[i]
			files[f.file].needed[f.offset] = int64(f.stored)
		}
	}
	return nil
}
