package sealed

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

const (
	secretSize = 32
	maxKeys    = 10_000
	maxFile    = 4 << 20
)

// ErrKeys means that a file of keys is not valid.
var ErrKeys = errors.New("not a file of keys")

// Keys are those that a host has.
type Keys struct {
	byID   map[[keyIDSize]byte]*key
	own    *key            // seals what belongs to no owner with a key
	owners map[string]*key // by owner
}

type key struct {
	id     [keyIDSize]byte
	secret [secretSize]byte
	owner  string // empty for one of the hosts
}

func newKey(secret [secretSize]byte, owner string) *key {
	sum := sha256.Sum256(append([]byte(format+" key id\x00"), secret[:]...))
	return &key{[keyIDSize]byte(sum[:]), secret, owner}
}

// ReadKeys reads a file of keys that nobody but its owner may read. Each line is a key of 64 hexadecimal digits and,
// after a space, the owner of the sandboxes that are sealed under it; a line without an owner is a key of the host. The
// first one of each is for what is sealed from now on, all open what was sealed before. Empty lines, and those that
// begin with '#', say nothing. The error is ErrKeys, or one of the file system.
func ReadKeys(path string) (*Keys, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading keys: %w", err)
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("reading keys: %w", err)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%w: %s: others may read it: chmod 600 %s", ErrKeys, path, path)
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("reading keys: %w", err)
	}
	k, err := parseKeys(text)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrKeys, path, err)
	}
	return k, nil
}

func parseKeys(text []byte) (*Keys, error) {
	if len(text) > maxFile {
		return nil, fmt.Errorf("it has more than %d bytes", maxFile)
	}
	k := &Keys{byID: map[[keyIDSize]byte]*key{}, owners: map[string]*key{}}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || line[0] == '#' {
			continue
		}
		digits, owner, _ := strings.Cut(line, " ")
		owner = strings.TrimSpace(owner)
		secret, err := hex.DecodeString(digits)
		if err != nil || len(secret) != secretSize {
			// The line is not in the error: it may be a key.
			return nil, fmt.Errorf("line %d: a key is %d hexadecimal digits: openssl rand -hex %d makes one", n, 2*secretSize, secretSize)
		}
		one := newKey([secretSize]byte(secret), owner)
		switch {
		case k.byID[one.id] != nil:
			return nil, fmt.Errorf("line %d: that key is there twice", n)
		case len(k.byID) == maxKeys:
			return nil, fmt.Errorf("line %d: it has more than %d keys", n, maxKeys)
		}
		k.byID[one.id] = one
		switch {
		case owner == "" && k.own == nil:
			k.own = one
		case owner != "" && k.owners[owner] == nil:
			k.owners[owner] = one
		}
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if k.own == nil {
		return nil, errors.New("it has no key of the host: a line with a key and without an owner")
	}
	return k, nil
}
