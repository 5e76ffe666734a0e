// Package accounts has the users of a guest, as its passwd(5) and group(5) have them.
package accounts

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/guest"
)

// Account is a user of a guest.
type Account struct {
	Name     string
	UID, GID int
	Home     string // absolute
	Dir      string // absolute, in which relative paths begin; "" is Home
}

// Accounts are users and groups of a guest. The zero value has none: use Read.
type Accounts struct {
	byName map[string]Account
	users  map[int]string
	groups map[int]string
}

// maxFile bounds what is read of each file, in bytes.
const maxFile = 1 << 20

// boundedBuffer takes a bounded number of bytes, and drops the rest.
type boundedBuffer struct {
	bytes.Buffer
	left int
}

func (b *boundedBuffer) Write(p []byte) (int, error) {
	n := min(len(p), b.left)
	b.left -= n
	b.Buffer.Write(p[:n])
	return len(p), nil
}

// Read reads the accounts of a guest: at most 1 MiB of each file. A guest without the files has root.
func Read(ctx context.Context, c *guest.Client) (Accounts, error) {
	a := empty()
	for file, add := range map[string]func(string){"/etc/passwd": a.addUsers, "/etc/group": a.addGroups} {
		b := boundedBuffer{left: maxFile}
		if _, err := c.ReadFile(ctx, file, &b, 0, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return a, err
		}
		add(strings.ToValidUTF8(b.String(), "\uFFFD"))
	}
	return a, nil
}

func empty() Accounts {
	return Accounts{byName: map[string]Account{"root": {Name: "root", Home: "/root"}}, users: map[int]string{0: "root"}, groups: map[int]string{0: "root"}}
}

// addUsers adds the users of a passwd(5). Lines that are none are left out.
func (a Accounts) addUsers(passwd string) {
	for line := range strings.Lines(passwd) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), ":")
		if len(f) < 6 || f[0] == "" {
			continue
		}
		uid, err := strconv.ParseUint(f[2], 10, 31)
		gid, err2 := strconv.ParseUint(f[3], 10, 31)
		if err != nil || err2 != nil {
			continue
		}
		home := f[5]
		if !path.IsAbs(home) {
			home = "/"
		}
		a.byName[f[0]] = Account{Name: f[0], UID: int(uid), GID: int(gid), Home: path.Clean(home)}
		if a.users[int(uid)] == "" {
			a.users[int(uid)] = f[0]
		}
	}
}

// addGroups adds the groups of a group(5).
func (a Accounts) addGroups(group string) {
	for line := range strings.Lines(group) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), ":")
		if len(f) < 3 {
			continue
		}
		if gid, err := strconv.ParseUint(f[2], 10, 31); err == nil && a.groups[int(gid)] == "" {
			a.groups[int(gid)] = f[0]
		}
	}
}

// Find returns the account of a name.
func (a Accounts) Find(name string) (Account, bool) {
	u, ok := a.byName[name]
	return u, ok
}

// User returns the name of a user, or the number of one that has none.
func (a Accounts) User(uid int) string {
	if n := a.users[uid]; n != "" {
		return n
	}
	return strconv.Itoa(uid)
}

// Group returns the name of a group, or the number of one that has none.
func (a Accounts) Group(gid int) string {
	if n := a.groups[gid]; n != "" {
		return n
	}
	return strconv.Itoa(gid)
}

// FindGroup returns the number of a group.
func (a Accounts) FindGroup(name string) (int, bool) {
	for gid, n := range a.groups {
		if n == name {
			return gid, true
		}
	}
	return 0, false
}

// Owner is the user as an owner of files.
func (u Account) Owner() *guest.Owner { return &guest.Owner{UID: u.UID, GID: u.GID} }

// ErrPath says that a path has a zero byte.
var ErrPath = errors.New("the path contains a zero byte")

// Path returns the absolute path that the user means: others are relative to Dir, or to the user's home. The error is
// ErrPath.
func (u Account) Path(name string) (string, error) {
	switch {
	case strings.ContainsRune(name, 0):
		return "", ErrPath
	case name == "":
		return cmp.Or(u.Dir, u.Home), nil
	case name == "~":
		return u.Home, nil
	case strings.HasPrefix(name, "~/"):
		return path.Join(u.Home, name[2:]), nil
	case path.IsAbs(name):
		return path.Clean(name), nil
	}
	return path.Join(cmp.Or(u.Dir, u.Home), name), nil
}
