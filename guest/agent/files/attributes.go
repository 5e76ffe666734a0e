package files

import (
	"errors"
	"os"
	"strings"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/drowse-vm/drowse/guest/agentpb"
)

// userAttributes begins the names of the extended attributes that xattr(7) leaves to users.
const userAttributes = "user."

// names splits what listxattr(2) returns, and leaves those that begin with prefix.
func names(list []byte, prefix string) (out []string) {
	for name := range strings.SplitSeq(string(list), "\x00") {
		if strings.HasPrefix(name, prefix) {
			out = append(out, name)
		}
	}
	return out
}

// attributes returns a file's extended attributes of users, up to MaxAttributes. What cannot be read is left out: a
// file is described by more than its attributes.
func attributes(path string) map[string][]byte {
	var list, value [agentpb.MaxAttributes]byte
	n, err := unix.Llistxattr(path, list[:])
	if err != nil || n == 0 {
		return nil
	}
	var out map[string][]byte
	room := agentpb.MaxAttributes
	for _, name := range names(list[:n], userAttributes) {
		n, err := unix.Lgetxattr(path, name, value[:])
		if err != nil || len(name)+n > room {
			continue
		}
		room -= len(name) + n
		if out == nil {
			out = map[string][]byte{}
		}
		out[name] = append([]byte{}, value[:n]...)
	}
	return out
}

// checkAttributes refuses names that are not all below the prefix, and more than attributes returns.
func checkAttributes(m *agentpb.Attributes) error {
	size := 0
	for name, value := range m.GetValues() {
		if !strings.HasPrefix(name, m.Prefix) || strings.IndexByte(name, 0) >= 0 {
			return status.Errorf(codes.InvalidArgument, "an attribute named %q below %q", name, m.Prefix)
		}
		size += len(name) + len(value)
	}
	switch {
	case m != nil && !strings.HasPrefix(m.Prefix, userAttributes):
		return status.Errorf(codes.InvalidArgument, "attributes named %q: only those below %q are set", m.Prefix, userAttributes)
	case size > agentpb.MaxAttributes:
		return status.Errorf(codes.InvalidArgument, "%d bytes of attributes, at most %d", size, agentpb.MaxAttributes)
	}
	return nil
}

// setAttributes replaces the attributes below m's prefix. A file system without them has none to replace.
func setAttributes(f *os.File, m *agentpb.Attributes) error {
	fd := int(f.Fd())
	var list [64 << 10]byte // XATTR_LIST_MAX
	n, err := unix.Flistxattr(fd, list[:])
	if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return &os.PathError{Op: "listxattr", Path: f.Name(), Err: err}
	}
	for _, name := range names(list[:max(n, 0)], m.Prefix) {
		if _, stays := m.Values[name]; stays {
			continue
		}
		if err := unix.Fremovexattr(fd, name); err != nil && !errors.Is(err, unix.ENODATA) {
			return &os.PathError{Op: "removexattr", Path: f.Name(), Err: err}
		}
	}
	for name, value := range m.Values {
		err := unix.Fsetxattr(fd, name, value, 0)
		if errors.Is(err, unix.ENOTSUP) {
			return status.Errorf(codes.FailedPrecondition, "the file system of %s has no attributes of users", f.Name())
		}
		if err != nil {
			return &os.PathError{Op: "setxattr", Path: f.Name(), Err: err}
		}
	}
	return nil
}
