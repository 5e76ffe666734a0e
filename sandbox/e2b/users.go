package e2b

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"

	"connectrpc.com/connect"

	"github.com/drowse-vm/drowse/guest"
)

// defaultUser is who commands run as if a request chooses nobody and the guest has the user. Otherwise it is the
// user of the image, or root.
const defaultUser = "user"

// account is a user of a guest, by its passwd(5).
type account struct {
	name     string
	uid, gid int
	home     string
}

// accounts are users and groups of a guest, as its files have them.
type accounts struct {
	byName map[string]account
	users  map[int]string
	groups map[int]string
}

// maxAccounts bounds the files, in bytes.
const maxAccounts = 1 << 20

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

// text makes a guest's text what messages can carry: their strings are UTF-8.
func text(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// readAccounts reads the users of a guest. A guest without the files has root.
func readAccounts(ctx context.Context, c *guest.Client) (accounts, error) {
	a := newAccounts()
	for file, add := range map[string]func(string){"/etc/passwd": a.addUsers, "/etc/group": a.addGroups} {
		b := boundedBuffer{left: maxAccounts}
		if _, err := c.ReadFile(ctx, file, &b, 0, 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return a, err
		}
		add(text(b.String()))
	}
	return a, nil
}

func newAccounts() accounts {
	return accounts{byName: map[string]account{"root": {"root", 0, 0, "/root"}}, users: map[int]string{0: "root"}, groups: map[int]string{0: "root"}}
}

// addUsers adds the users of a passwd(5). Lines that are none are left out.
func (a accounts) addUsers(passwd string) {
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
		a.byName[f[0]] = account{f[0], int(uid), int(gid), path.Clean(home)}
		if a.users[int(uid)] == "" {
			a.users[int(uid)] = f[0]
		}
	}
}

// addGroups adds the groups of a group(5).
func (a accounts) addGroups(group string) {
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

// find returns the user of a request.
func (a accounts) find(ctx context.Context) (account, error) {
	name := userOf(ctx)
	if name == "" {
		name = defaultUser
		if _, ok := a.byName[name]; !ok {
			cmd, err := boxOf(ctx).Command(guest.Cmd{})
			if err != nil {
				return account{}, err
			}
			if name, _, _ = strings.Cut(cmd.User, ":"); name == "" {
				name = "root"
			}
			if uid, err := strconv.Atoi(name); err == nil && a.users[uid] != "" {
				name = a.users[uid]
			}
		}
	}
	u, ok := a.byName[name]
	if !ok {
		return u, connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("the sandbox has no user %q", name))
	}
	return u, nil
}

// owner is the user as an owner of files.
func (u account) owner() *guest.Owner { return &guest.Owner{UID: u.uid, GID: u.gid} }

// path returns the absolute path that a client means: others are relative to the user's home.
func (u account) path(name string) (string, error) {
	switch {
	case strings.ContainsRune(name, 0):
		return "", connect.NewError(connect.CodeInvalidArgument, errors.New("the path contains a zero byte"))
	case name == "" || name == "~":
		return u.home, nil
	case strings.HasPrefix(name, "~/"):
		return path.Join(u.home, name[2:]), nil
	case path.IsAbs(name):
		return path.Clean(name), nil
	}
	return path.Join(u.home, name), nil
}

func (a accounts) user(uid int) string {
	if n := a.users[uid]; n != "" {
		return n
	}
	return strconv.Itoa(uid)
}

func (a accounts) group(gid int) string {
	if n := a.groups[gid]; n != "" {
		return n
	}
	return strconv.Itoa(gid)
}
