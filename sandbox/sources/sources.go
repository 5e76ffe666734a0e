package sources

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/osfile"
	"github.com/drowse-vm/drowse/sandbox/spec"
)

// File is the name of the file with sources in a state directory.
const File = "secret.sources"

// Bounds of the file.
const (
	Max        = 256
	MaxOwners  = 256  // of a source
	MaxCommand = 4096 // bytes of a command with its arguments
	maxFile    = 1 << 20
)

// Source says where the value of a secret comes from. One of File, Command, Env and Credential is set.
type Source struct {
	// Name is like the name of a secret.
	Name string `json:"name"`
	// File is an absolute path.
	File string `json:"file,omitempty"`
	// Command is a program, by its absolute path, with its arguments. Its stdout is the value.
	Command []string `json:"command,omitempty"`
	// Env is a variable of the environment of `drowse serve`.
	Env string `json:"env,omitempty"`
	// Credential is a credential that systemd gives to `drowse serve` (systemd.exec(5), LoadCredential=).
	Credential string `json:"credential,omitempty"`
	// Owners own the sandboxes that may have it. A sandbox without an owner may have every source.
	Owners []string `json:"owners,omitempty"`
	// AllOwners lets every sandbox have it.
	AllOwners bool `json:"all_owners,omitempty"`
}

// Kinds of sources.
const (
	KindFile       = "file"
	KindCommand    = "command"
	KindEnv        = "env"
	KindCredential = "credential"
)

// Kind returns file, command, env or credential.
func (s *Source) Kind() string {
	switch {
	case s.File != "":
		return KindFile
	case len(s.Command) > 0:
		return KindCommand
	case s.Env != "":
		return KindEnv
	}
	return KindCredential
}

// Origin returns the source as Parse takes it, a command with its arguments in one line.
func (s *Source) Origin() string {
	return s.Kind() + ":" + s.File + strings.Join(s.Command, " ") + s.Env + s.Credential
}

// OfServe reports whether only `drowse serve` has the value.
func (s *Source) OfServe() bool { return s.Env != "" || s.Credential != "" }

// For reports whether a sandbox of an owner may have it; empty is a sandbox without one.
func (s *Source) For(owner string) bool {
	return owner == "" || s.AllOwners || slices.Contains(s.Owners, owner)
}

// Parse reads file:PATH, env:VARIABLE, credential:NAME, or command:PROGRAM with the arguments in more.
func Parse(name, origin string, more ...string) (Source, error) {
	s := Source{Name: name}
	kind, rest, _ := strings.Cut(origin, ":")
	switch {
	case kind != KindCommand && len(more) > 0:
		return s, fmt.Errorf("%w: source %s: only a command has arguments", spec.ErrSecrets, name)
	case kind == KindFile:
		s.File = rest
	case kind == KindCommand:
		s.Command = append([]string{rest}, more...)
	case kind == KindEnv:
		s.Env = rest
	case kind == KindCredential:
		s.Credential = rest
	default:
		return s, fmt.Errorf("%w: source %s: use file:PATH, command:PROGRAM ARGUMENT..., env:VARIABLE or credential:NAME", spec.ErrSecrets, name)
	}
	return s, s.check()
}

func (s *Source) check() error {
	if err := spec.CheckSecretName(s.Name); err != nil {
		return err
	}
	bad := func(why string) error { return fmt.Errorf("%w: source %s: %s", spec.ErrSecrets, s.Name, why) }
	kinds, size := 0, 0
	for _, is := range []bool{s.File != "", len(s.Command) > 0, s.Env != "", s.Credential != ""} {
		if is {
			kinds++
		}
	}
	for _, word := range s.Command {
		size += len(word) + 1
	}
	all := append([]string{s.File, s.Env, s.Credential}, s.Command...)
	switch {
	case kinds != 1:
		return bad("it has one file, command, env or credential, and not several or none")
	case slices.ContainsFunc(all, func(text string) bool { return strings.ContainsRune(text, 0) || len(text) > MaxCommand }), size > MaxCommand:
		return bad(fmt.Sprintf("use at most %d bytes, and no zero byte", MaxCommand))
	case s.File != "" && !filepath.IsAbs(s.File), len(s.Command) > 0 && !filepath.IsAbs(s.Command[0]):
		return bad("use an absolute path")
	case strings.Contains(s.Env, "="):
		return bad("a variable has no = in its name")
	case strings.Contains(s.Credential, "/") || s.Credential == "." || s.Credential == "..":
		return bad("a credential has no / in its name")
	case len(s.Owners) > MaxOwners || slices.Contains(s.Owners, ""):
		return bad(fmt.Sprintf("name at most %d owners", MaxOwners))
	}
	return nil
}

// Store is the sources in a file. Each use reads the file. Its methods may be called from any goroutine.
type Store struct {
	path string
	log  *slog.Logger
	runs singleflight.Group // of commands, by their words
}

// Open returns the sources of a file, which need not exist yet. The log gets what is wrong with a source: paths and
// the output of commands, which users of sandboxes do not get.
func Open(path string, log *slog.Logger) *Store { return &Store{path: path, log: log} }

// document is the content of the file.
type document struct {
	Version int      `json:"version"`
	Sources []Source `json:"sources"`
}

// Read returns all sources, in the order of their names. A missing file has none.
func (s *Store) Read() ([]Source, error) {
	fail := func(err error) ([]Source, error) {
		return nil, fmt.Errorf("%w: reading the sources in %s: %w", spec.ErrSecrets, s.path, err)
	}
	f, err := os.OpenFile(s.path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return fail(err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fail(err)
	}
	// Whoever writes it runs commands as this user.
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fail(errors.New("it is not a file"))
	case st.Mode&0o022 != 0:
		return fail(errors.New("others may write to it: use `chmod go-w`"))
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return fail(fmt.Errorf("it belongs to user %d: give it to root", st.Uid))
	}
	text, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return fail(err)
	}
	list, err := parse(text)
	if err != nil {
		return fail(err)
	}
	return list, nil
}

func parse(text []byte) ([]Source, error) {
	if len(text) > maxFile {
		return nil, fmt.Errorf("it has more than %d bytes", maxFile)
	}
	var doc document
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(&doc); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is more after the JSON object")
	}
	switch {
	case doc.Version != 1:
		return nil, fmt.Errorf("version %d: this drowse knows version 1", doc.Version)
	case len(doc.Sources) > Max:
		return nil, fmt.Errorf("%d sources: use at most %d", len(doc.Sources), Max)
	}
	names := map[string]bool{}
	for i := range doc.Sources {
		one := &doc.Sources[i]
		if err := one.check(); err != nil {
			return nil, err
		}
		if names[one.Name] {
			return nil, fmt.Errorf("source %s stands there twice", one.Name)
		}
		names[one.Name] = true
	}
	slices.SortFunc(doc.Sources, func(a, b Source) int { return strings.Compare(a.Name, b.Name) })
	return doc.Sources, nil
}

// Find returns the source of a name that a sandbox of an owner may have. The error does not tell whether there is one
// for others.
func (s *Store) Find(name, owner string) (Source, error) {
	list, err := s.Read()
	if err != nil {
		s.log.Error("secrets have no sources", "error", err)
		return Source{}, fmt.Errorf("%w: the sources cannot be read: see the log", spec.ErrSecrets)
	}
	i := slices.IndexFunc(list, func(one Source) bool { return one.Name == name })
	if i < 0 || !list[i].For(owner) {
		return Source{}, fmt.Errorf("%w: there is no source %.64q for this sandbox", spec.ErrSecrets, name)
	}
	return list[i], nil
}

// Add adds a source. It replaces one of the same name.
func (s *Store) Add(one Source) error {
	if err := one.check(); err != nil {
		return err
	}
	return s.change(func(all []Source) ([]Source, error) {
		all = slices.DeleteFunc(all, func(have Source) bool { return have.Name == one.Name })
		if len(all) >= Max {
			return nil, fmt.Errorf("%w: there are %d sources: remove some", spec.ErrSecrets, Max)
		}
		return append(all, one), nil
	})
}

// Remove removes a source: spec.ErrNotFound if there is none of that name.
func (s *Store) Remove(name string) error {
	return s.change(func(all []Source) ([]Source, error) {
		i := slices.IndexFunc(all, func(have Source) bool { return have.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("%w: source %q", spec.ErrNotFound, name)
		}
		return slices.Delete(all, i, i+1), nil
	})
}

// change replaces the file. A lock file beside it orders concurrent changes.
func (s *Store) change(do func([]Source) ([]Source, error)) error {
	lock, err := osfile.OpenLocked(context.Background(), s.path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600, osfile.Exclusive)
	if err != nil {
		return fmt.Errorf("changing %s: %w", s.path, err)
	}
	defer lock.Close()
	all, err := s.Read()
	if err != nil {
		return err
	}
	if all, err = do(all); err != nil {
		return err
	}
	text, err := json.MarshalIndent(document{1, all}, "", "  ")
	if err != nil {
		return err
	}
	if len(text) > maxFile {
		return fmt.Errorf("%w: the sources have more than %d bytes", spec.ErrSecrets, maxFile)
	}
	if err := osfile.WriteFile(s.path, append(text, '\n'), 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", s.path, err)
	}
	return nil
}
