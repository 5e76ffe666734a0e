package proc

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
)

// account is the user that a process runs as.
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

// maxGroups bounds the supplementary groups.
const maxGroups = 256

// lookupAccount resolves "user", "uid", "user:group" and so on against the passwd and group files under dir. A
// numeric uid needs no entry. The empty string is root; it needs no file.
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
	err := eachEntry(path, 7, 2, func(f []string, ids []uint32) bool {
		if f[0] == user || idErr == nil && ids[0] == uint32(id) {
			a, found = account{uid: ids[0], gid: ids[1], name: f[0], home: f[5], shell: f[6]}, true
		}
		return !found
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

// lookupGroups sets a's group to the one asked for, or else adds all groups that list its name.
func lookupGroups(path string, a *account, group string, asked bool) error {
	id, idErr := strconv.ParseUint(group, 10, 32)
	found := false
	err := eachEntry(path, 4, 1, func(f []string, ids []uint32) bool {
		switch {
		case !asked:
			if len(a.groups) < maxGroups && slices.Contains(strings.Split(f[3], ","), a.name) {
				a.groups = append(a.groups, ids[0])
			}
		case f[0] == group || idErr == nil && ids[0] == uint32(id):
			a.gid, found = ids[0], true
		}
		return !found
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

// eachEntry calls f for each entry of passwd(5) or group(5) with the given number of fields, and of numbers from
// the third field on, until f returns false. It skips comments and malformed lines.
func eachEntry(path string, fields, numbers int, f func(fields []string, ids []uint32) bool) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	sc := bufio.NewScanner(io.LimitReader(file, maxAccountFile))
next:
	for sc.Scan() {
		entry := strings.Split(sc.Text(), ":")
		if len(entry) < fields || strings.HasPrefix(entry[0], "#") {
			continue
		}
		var ids []uint32
		for _, text := range entry[2 : 2+numbers] {
			id, err := strconv.ParseUint(text, 10, 32)
			if err != nil {
				continue next
			}
			ids = append(ids, uint32(id))
		}
		if !f(entry, ids) {
			return nil
		}
	}
	return sc.Err()
}
