package api

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
)

// Scope is what a caller may do.
type Scope string

// The scopes. The write scope includes the read scope.
const (
	ScopeNone  Scope = "" // of a route: any caller
	ScopeRead  Scope = "read"
	ScopeWrite Scope = "write"
)

// allows reports whether a caller of scope s may do what needs the scope want.
func (s Scope) allows(want Scope) bool {
	return want == ScopeNone || s == want || s == ScopeWrite && want == ScopeRead
}

// TokensFile is the name of the file with tokens in a state directory.
const TokensFile = "api.tokens"

// Bounds of a file with tokens.
const (
	MaxTokens    = 1000
	maxTokenFile = 256 << 10 // bytes
	maxTokenText = 512       // bytes of a token in a request
)

// tokenPrefix begins tokens, so that a leaked token is recognized.
const tokenPrefix = "drowse_"

// e2bPrefix begins keys that E2B's clients accept.
const e2bPrefix = "e2b_"

var tokenNameRE = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// ErrTokens means that a file with tokens cannot be used.
var ErrTokens = errors.New("the file with tokens cannot be used")

// Token is a line of the file: its name, the SHA-256 of the secret that its holder sends, and the holder's scope.
type Token struct {
	Name  string
	Hash  [sha256.Size]byte
	Scope Scope
}

// Tokens is a file of lines "NAME SHA256-HEX SCOPE". Empty lines and lines that begin with # are ignored. It must
// belong to this process's user or root, and no other user may read or write it. The server reads it for each
// request, so a removed token fails at once.
type Tokens struct{ Path string }

// Read reads the file. A missing file has no tokens.
func (f Tokens) Read() ([]Token, error) {
	file, err := os.OpenFile(f.Path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTokens, err)
	}
	defer file.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrTokens, f.Path, err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, fmt.Errorf("%w: %s is not a file", ErrTokens, f.Path)
	case st.Mode&0o077 != 0:
		return nil, fmt.Errorf("%w: others may use %s: take that away with `chmod 600`", ErrTokens, f.Path)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return nil, fmt.Errorf("%w: %s belongs to user %d: give it to root", ErrTokens, f.Path, st.Uid)
	}
	text, err := io.ReadAll(io.LimitReader(file, maxTokenFile+1))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTokens, err)
	}
	return parseTokens(text)
}

func parseTokens(text []byte) (out []Token, err error) {
	if len(text) > maxTokenFile {
		return nil, fmt.Errorf("%w: it has more than %d bytes", ErrTokens, maxTokenFile)
	}
	names := map[string]bool{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		f := strings.Fields(lines.Text())
		if len(f) == 0 || strings.HasPrefix(f[0], "#") {
			continue
		}
		// The line is not quoted: it may contain a token by mistake.
		bad := func(why string) error { return fmt.Errorf("%w: line %d: %s", ErrTokens, n, why) }
		if len(f) != 3 {
			return nil, bad("use NAME SHA256-HEX SCOPE")
		}
		t := Token{Name: f[0], Scope: Scope(f[2])}
		sum, err := hex.DecodeString(f[1])
		switch {
		case !tokenNameRE.MatchString(t.Name):
			return nil, bad("use letters, digits, dots, underscores and hyphens in the name, 64 at most")
		case names[t.Name]:
			return nil, bad("there is another token of that name")
		case err != nil || len(sum) != sha256.Size:
			return nil, bad("use a SHA-256 of 64 hex digits")
		case t.Scope != ScopeRead && t.Scope != ScopeWrite:
			return nil, bad("use read or write as the scope")
		case len(out) == MaxTokens:
			return nil, fmt.Errorf("%w: it has more than %d tokens", ErrTokens, MaxTokens)
		}
		names[t.Name] = true
		copy(t.Hash[:], sum)
		out = append(out, t)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTokens, err)
	}
	return out, nil
}

// Find returns the token with the secret shown. Its time depends neither on which token it is, nor on how much of
// the secret is right.
func (f Tokens) Find(shown string) (t Token, ok bool, err error) {
	all, err := f.Read()
	if err != nil || len(shown) > maxTokenText {
		return Token{}, false, err
	}
	sum := sha256.Sum256([]byte(shown))
	for _, have := range all {
		if subtle.ConstantTimeCompare(have.Hash[:], sum[:]) == 1 {
			t, ok = have, true
		}
	}
	return t, ok, nil
}

// Create makes a token and adds it to the file. It returns the secret, which the file stores only as a hash.
func (f Tokens) Create(name string, scope Scope) (token string, err error) {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return f.create(name, scope, tokenPrefix+base64.RawURLEncoding.EncodeToString(b[:]))
}

// CreateE2B is Create for a token of the form that E2B's clients want of a key. It is as good as any other.
func (f Tokens) CreateE2B(name string, scope Scope) (token string, err error) {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return f.create(name, scope, e2bPrefix+hex.EncodeToString(b[:]))
}

func (f Tokens) create(name string, scope Scope, token string) (string, error) {
	if !tokenNameRE.MatchString(name) {
		return "", fmt.Errorf("%w: name %q: use letters, digits, dots, underscores and hyphens, 64 at most", ErrTokens, name)
	}
	if scope != ScopeRead && scope != ScopeWrite {
		return "", fmt.Errorf("%w: scope %q: use %s or %s", ErrTokens, scope, ScopeRead, ScopeWrite)
	}
	return token, f.change(func(all []Token) ([]Token, error) {
		for _, t := range all {
			if t.Name == name {
				return nil, fmt.Errorf("%w: there is a token %q: remove it with `drowse token rm`, or use another name", ErrTokens, name)
			}
		}
		if len(all) >= MaxTokens {
			return nil, fmt.Errorf("%w: it has %d tokens already: remove some", ErrTokens, MaxTokens)
		}
		return append(all, Token{name, sha256.Sum256([]byte(token)), scope}), nil
	})
}

// Remove removes a token from the file.
func (f Tokens) Remove(name string) error {
	return f.change(func(all []Token) ([]Token, error) {
		for i, t := range all {
			if t.Name == name {
				return append(all[:i:i], all[i+1:]...), nil
			}
		}
		return nil, fmt.Errorf("%w: there is no token %q", ErrTokens, name)
	})
}

// change replaces the file. A lock file beside it orders concurrent changes.
func (f Tokens) change(do func([]Token) ([]Token, error)) (err error) {
	const flags = os.O_RDWR | os.O_CREATE | unix.O_NOFOLLOW
	lock, err := osfile.OpenLocked(context.Background(), f.Path+".lock", flags, 0o600, osfile.Exclusive)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrTokens, err)
	}
	defer lock.Close()
	all, err := f.Read()
	if err != nil {
		return err
	}
	if all, err = do(all); err != nil {
		return err
	}
	var b bytes.Buffer
	for _, t := range all {
		fmt.Fprintf(&b, "%s %x %s\n", t.Name, t.Hash, t.Scope)
	}
	if err := osfile.WriteFile(f.Path, b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", f.Path, err)
	}
	return nil
}
