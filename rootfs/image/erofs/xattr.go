package erofs

import (
	"cmp"
	"strings"
)

const (
	ACLAccess  = "system.posix_acl_access"
	aclDefault = "system.posix_acl_default"
)

// KeepXattr reports whether EROFS has a name space for an extended attribute (erofs_fs.h, EROFS_XATTR_INDEX_*).
func KeepXattr(name string) bool {
	if name == ACLAccess || name == aclDefault {
		return true
	}
	for _, p := range []string{"user.", "trusted.", "security."} {
		if len(name) > len(p) && strings.HasPrefix(name, p) {
			return true
		}
	}
	return false
}

// erofsXattrs returns the attributes under the names that go-erofs maps to the right index. EROFS stores a POSIX
// ACL with an index and an empty rest of the name; go-erofs does that for the name with a dot at its end.
func erofsXattrs(in map[string]string) map[string]string {
	return renamed(in, map[string]string{ACLAccess: ACLAccess + ".", aclDefault: aclDefault + "."})
}

// UnixXattrs reverses erofsXattrs.
func UnixXattrs(in map[string]string) map[string]string {
	return renamed(in, map[string]string{ACLAccess + ".": ACLAccess, aclDefault + ".": aclDefault})
}

func renamed(in, names map[string]string) map[string]string {
	if len(in) == 0 {
		return nil
	}
	out := make(map[string]string, len(in))
	for k, v := range in {
		out[cmp.Or(names[k], k)] = v
	}
	return out
}
