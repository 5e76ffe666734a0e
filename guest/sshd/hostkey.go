package sshd

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/crypto/ssh"

	"github.com/drowse-vm/drowse/internal/osfile"
)

// HostKeyAlias is the name of the key in known_hosts, for ssh's option of that name. All VMs of a store share it.
const HostKeyAlias = "drowse"

const (
	keyFile   = "host_key"
	knownFile = "known_hosts"
	// maxKeyFile bounds the size of a key file, in bytes.
	maxKeyFile = 16 << 10
)

// LoadHostKey returns the host key in dir, and the path of a file there for ssh's option UserKnownHostsFile. At the
// first use it makes the key atomically, with mode 0600. Any number of processes may call it at once.
func LoadHostKey(dir string) (key ssh.Signer, knownHosts string, err error) {
	fail := func(err error) (ssh.Signer, string, error) {
		return nil, "", fmt.Errorf("the host key in %s: %w", dir, err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fail(err)
	}
	path := filepath.Join(dir, keyFile)
	text, err := readKey(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err := makeKey(path); err != nil {
			return fail(err)
		}
		text, err = readKey(path)
	}
	if err != nil {
		return fail(err)
	}
	if key, err = ssh.ParsePrivateKey(text); err != nil {
		return fail(fmt.Errorf("%w: remove %s to have a new one made", err, path))
	}
	knownHosts = filepath.Join(dir, knownFile)
	line := append([]byte(HostKeyAlias+" "), ssh.MarshalAuthorizedKey(key.PublicKey())...)
	if have, err := os.ReadFile(knownHosts); err != nil || !bytes.Equal(have, line) {
		if err := osfile.WriteFile(knownHosts, line, 0o600); err != nil {
			return fail(err)
		}
	}
	return key, knownHosts, nil
}

// readKey reads a key file that only its owner can read.
func readKey(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !fi.Mode().IsRegular() || fi.Mode().Perm()&0o077 != 0 || fi.Size() > maxKeyFile {
		return nil, fmt.Errorf("%s is not a private key file: %v, %d bytes: it must be a file that its owner alone can read", path, fi.Mode(), fi.Size())
	}
	text := make([]byte, fi.Size())
	_, err = f.ReadAt(text, 0)
	return text, err
}

// makeKey makes a key, unless another process has made one first.
func makeKey(path string) error {
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	block, err := ssh.MarshalPrivateKey(private, "drowse host key")
	if err != nil {
		return err
	}
	err = osfile.WriteNew(path, pem.EncodeToMemory(block), 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}
