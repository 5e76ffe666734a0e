package proc

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// account is whom a process runs as.
type account struct {
	uid, gid uint32
	groups   []uint32
	name     string
	home     string
	shell    string
}

var root = account{name: "root", home: "/root", shell: "/bin/sh"}

// maxAccountFile bounds how much of passwd(5) and group(5) is read, in bytes.
const maxAccountFile = 1 << 20

// maxGroups is the kernel's limit of supplementary groups that matters here.
const maxGroups = 256

// lookupAccount resolves "user", "uid", "user:group" and so on against the
// passwd and group files under dir. A numeric uid needs no entry. The empty
// string is root without a look at any file.
func lookupAccount(dir, spec string) (account, error) {
	if spec == "" {
		return root, nil
	}
	user, group, hasGroup := strings.Cut(spec, ":")
	a, err := lookupUser(dir+"/passwd", user)
	if err != nil {
		return account{}, err
	}
	if err := lookupGroups(dir+"/group", &a, group, hasGroup); err != nil {
		return account{}, err
	}
	return a, nil
}

func lookupUser(path, user string) (account, error) {
	id, idErr := strconv.ParseUint(user, 10, 32)
	a := account{uid: uint32(id), gid: 0, name: user, home: "/", shell: "/bin/sh"}
	found := false
	err := eachLine(path, func(line string) bool {
		f := strings.Split(line, ":")
		if len(f) < 7 {
			return true
		}
		uid, err1 := strconv.ParseUint(f[2], 10, 32)
		gid, err2 := strconv.ParseUint(f[3], 10, 32)
		if err1 != nil || err2 != nil {
			return true
		}
		if f[0] == user || idErr == nil && uid == id {
			a = account{uid: uint32(uid), gid: uint32(gid), name: f[0], home: f[5], shell: f[6]}
			found = true
			return false
		}
		return true
	})
	if err != nil && !os.IsNotExist(err) {
		return account{}, fmt.Errorf("look up user %q: %w", user, err)
	}
	if !found && idErr != nil {
		return account{}, fmt.Errorf("user %q is not in %s: %w", user, path, os.ErrNotExist)
	}
	if a.home == "" {
		a.home = "/"
	}
	return a, nil
}

// lookupGroups sets the groups of a: the one asked for, or else all that list
// its name.
func lookupGroups(path string, a *account, group string, asked bool) error {
	id, idErr := strconv.ParseUint(group, 10, 32)
	found := false
	err := eachLine(path, func(line string) bool {
		f := strings.Split(line, ":")
		if len(f) < 4 {
			return true
		}
		gid, err := strconv.ParseUint(f[2], 10, 32)
		if err != nil {
			return true
		}
		if asked {
			if f[0] == group || idErr == nil && gid == id {
				a.gid, found = uint32(gid), true
				return false
			}
			return true
		}
		for _, member := range strings.Split(f[3], ",") {
			if member == a.name && len(a.groups) < maxGroups {
				a.groups = append(a.groups, uint32(gid))
			}
		}
		return true
	})
	if err != nil && !os.IsNotExist(err) {
		return fmt.Errorf("look up the groups of %q: %w", a.name, err)
	}
	if asked && !found {
		if idErr != nil {
			return fmt.Errorf("group %q is not in %s: %w", group, path, os.ErrNotExist)
		}
		a.gid = uint32(id)
	}
	return nil
}

// eachLine calls f for each line of the file until f returns false. Comments
// and empty lines are left out.
func eachLine(path string, f func(string) bool) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	sc := bufio.NewScanner(io.LimitReader(file, maxAccountFile))
	for sc.Scan() {
		line := sc.Text()
		if line == "" || line[0] == '#' {
			continue
		}
		if !f(line) {
			return nil
		}
	}
	return sc.Err()
}
