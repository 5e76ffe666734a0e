package tokens

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
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/internal/osfile"
)

// File is the name of the file with tokens in a state directory.
const File = "api.tokens"

// Bounds of a file with tokens.
const (
	Max          = 1000
	MaxRate      = 100_000 // requests a second
	maxOwner     = 128     // bytes: spec.MaxMetadataOwner
	maxTokenFile = 1 << 20 // bytes
	maxTokenText = 512     // bytes of a token in a request
)

// tokenPrefix begins tokens, so that a leaked token is recognized.
const tokenPrefix = "drowse_"

// e2bPrefix begins keys that E2B's clients accept.
const e2bPrefix = "e2b_"

var tokenNameRE = lazyregexp.New(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// Errors of tokens.
var (
	// ErrTokens means that a file with tokens cannot be used, or that a token cannot be like that.
	ErrTokens = errors.New("the file with tokens cannot be used")
	// ErrUnknown means that no token has the secret that was shown.
	ErrUnknown = errors.New("the token is not known")
	// ErrExpired means that the token's time is over.
	ErrExpired = errors.New("the token has expired")
	// ErrRate means that the token has been used more often than it may be.
	ErrRate = errors.New("the token is used too often")
)

// Token is what the file says of a token.
type Token struct {
	Name string
	// Hash is the SHA-256 of the secret that its holder shows.
	Hash   [sha256.Size]byte
	Scopes Scopes
	// Owner, if not empty, is whose sandboxes it reaches: those with this owner in their metadata, and no others.
	// Such a token has no ScopeAdmin.
	Owner string
	// Expires is when it ends; zero is never.
	Expires time.Time
	// Rate is how many requests it has a second, and at once after a quiet second; 0 is no limit.
	Rate int
}

// expired reports whether the token's time is over.
func (t *Token) expired(now time.Time) bool { return !t.Expires.IsZero() && !now.Before(t.Expires) }

// check returns what is wrong with the token beside its hash; empty if nothing is.
func (t *Token) check() string {
	bad := func(r rune) bool { return !unicode.IsPrint(r) }
	switch {
	case !tokenNameRE.MatchString(t.Name):
		return "use letters, digits, dots, underscores and hyphens in the name, 64 at most"
	case len(t.Scopes) == 0:
		return "it has no scope"
	case len(t.Owner) > maxOwner || strings.IndexFunc(t.Owner, bad) >= 0:
		return fmt.Sprintf("an owner is %d printable bytes at most", maxOwner)
	case t.Owner != "" && t.Scopes.Has(ScopeAdmin):
		return "a token with an owner cannot have the scope admin, whose requests concern all owners"
	case t.Rate < 0 || t.Rate > MaxRate:
		return fmt.Sprintf("use a rate of 1 to %d requests a second", MaxRate)
	}
	return ""
}

// Check returns what is wrong with the token beside its hash.
func (t Token) Check() error {
	if wrong := t.check(); wrong != "" {
		return errors.New(wrong)
	}
	return nil
}

// line returns the token as a line of the file.
func (t *Token) line() string {
	out := fmt.Sprintf("%s %x %s", t.Name, t.Hash, t.Scopes)
	if t.Owner != "" {
		out += " owner=" + url.QueryEscape(t.Owner)
	}
	if !t.Expires.IsZero() {
		out += " expires=" + t.Expires.UTC().Format(time.RFC3339)
	}
	if t.Rate != 0 {
		out += " rate=" + strconv.Itoa(t.Rate)
	}
	return out + "\n"
}

// set reads a further word of a line.
func (t *Token) set(word string) (ok bool) {
	key, value, _ := strings.Cut(word, "=")
	var err error
	switch key {
	case "owner":
		t.Owner, err = url.QueryUnescape(value)
	case "expires":
		t.Expires, err = time.Parse(time.RFC3339, value)
	case "rate":
		t.Rate, err = strconv.Atoi(value)
	default:
		return false
	}
	return err == nil && value != ""
}

// Store is a file of lines "NAME SHA256-HEX SCOPES", with "owner=", "expires=" and "rate=" after them where a token
// has these. Empty lines and lines that begin with # are ignored. The file must belong to this process's user or
// root, and no other user may read or write it. It is read for each request, so a removed token fails at once. The
// methods may be called from any goroutine.
type Store struct {
	path string

	mu    sync.Mutex // guards rates
	rates map[string]*limiter
}

// limiter is the use of one token.
type limiter struct {
	*rate.Limiter
	hash [sha256.Size]byte // of the token that it is for
}

// Open returns the store of a file, which need not exist yet.
func Open(path string) *Store { return &Store{path: path, rates: map[string]*limiter{}} }

// Path returns the name of the file.
func (f *Store) Path() string { return f.path }

// Read reads the file. A missing file has no tokens.
func (f *Store) Read() ([]Token, error) {
	file, err := os.OpenFile(f.path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrTokens, err)
	}
	defer file.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(file.Fd()), &st); err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrTokens, f.path, err)
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, fmt.Errorf("%w: %s is not a file", ErrTokens, f.path)
	case st.Mode&0o077 != 0:
		return nil, fmt.Errorf("%w: others may use %s: take that away with `chmod 600`", ErrTokens, f.path)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return nil, fmt.Errorf("%w: %s belongs to user %d: give it to root", ErrTokens, f.path, st.Uid)
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
		if len(f) < 3 {
			return nil, bad("use NAME SHA256-HEX SCOPES, and owner=, expires=, rate=")
		}
		t := Token{Name: f[0]}
		for _, word := range f[3:] {
			if !t.set(word) {
				return nil, bad("after the scopes, use owner=NAME, expires=2027-01-01T00:00:00Z and rate=NUMBER")
			}
		}
		if t.Scopes, err = ParseScopes(f[2]); err != nil {
			return nil, bad("use read, exec, files, create and admin as scopes, with commas between them")
		}
		sum, err := hex.DecodeString(f[1])
		wrong := t.check()
		switch {
		case wrong != "":
			return nil, bad(wrong)
		case names[t.Name]:
			return nil, bad("there is another token of that name")
		case err != nil || len(sum) != sha256.Size:
			return nil, bad("use a SHA-256 of 64 hex digits")
		case len(out) == Max:
			return nil, fmt.Errorf("%w: it has more than %d tokens", ErrTokens, Max)
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

// Find returns the token with the secret shown: ErrUnknown, or ErrExpired with the token. Its time depends neither on
// which token it is, nor on how much of the secret is right. It does not count as use.
func (f *Store) Find(shown string) (t Token, err error) {
	all, err := f.Read()
	if err != nil {
		return Token{}, err
	}
	if len(shown) > maxTokenText {
		return Token{}, ErrUnknown
	}
	sum := sha256.Sum256([]byte(shown))
	err = ErrUnknown
	for _, have := range all {
		if subtle.ConstantTimeCompare(have.Hash[:], sum[:]) == 1 {
			t, err = have, nil
		}
	}
	if err == nil && t.expired(time.Now()) {
		err = ErrExpired
	}
	return t, err
}

// Admit is Find that counts as one request of the token. With ErrRate, wait says when to try again.
func (f *Store) Admit(shown string) (t Token, wait time.Duration, err error) {
	if t, err = f.Find(shown); err != nil || t.Rate == 0 {
		return t, 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	l := f.rates[t.Name]
	if l == nil || l.hash != t.Hash || l.Burst() != t.Rate {
		if len(f.rates) >= Max {
			clear(f.rates) // of tokens that were removed, for the most part
		}
		l = &limiter{rate.NewLimiter(rate.Limit(t.Rate), t.Rate), t.Hash}
		f.rates[t.Name] = l
	}
	r := l.Reserve()
	if wait = r.Delay(); wait > 0 {
		r.Cancel()
		return t, wait, ErrRate
	}
	return t, 0, nil
}

// Valid returns ErrUnknown if a token that was found before is gone or has other rights now, and ErrExpired if it has
// expired: for what runs long.
func (f *Store) Valid(was Token) error {
	all, err := f.Read()
	if err != nil {
		return err
	}
	for _, t := range all {
		if t.Name == was.Name && t.Hash == was.Hash && t.Owner == was.Owner && slices.Equal(t.Scopes, was.Scopes) {
			if t.expired(time.Now()) {
				return ErrExpired
			}
			return nil
		}
	}
	return ErrUnknown
}

// Create makes a token like t, except for its hash, and adds it to the file. It returns the secret, which the file
// stores only as a hash.
func (f *Store) Create(t Token) (secret string, err error) {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return f.create(t, tokenPrefix+base64.RawURLEncoding.EncodeToString(b[:]))
}

// CreateE2B is Create for a token of the form that E2B's clients want of a key. It is as good as any other.
func (f *Store) CreateE2B(t Token) (secret string, err error) {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return f.create(t, e2bPrefix+hex.EncodeToString(b[:]))
}

func (f *Store) create(t Token, secret string) (string, error) {
	if wrong := t.check(); wrong != "" {
		return "", fmt.Errorf("%w: token %q: %s", ErrTokens, t.Name, wrong)
	}
	if t.expired(time.Now()) {
		return "", fmt.Errorf("%w: token %q would have expired at %s", ErrTokens, t.Name, t.Expires.Format(time.RFC3339))
	}
	t.Hash = sha256.Sum256([]byte(secret))
	return secret, f.change(func(all []Token) ([]Token, error) {
		for _, have := range all {
			if have.Name == t.Name {
				return nil, fmt.Errorf("%w: there is a token %q: remove it with `drowse token rm`, or use another name", ErrTokens, t.Name)
			}
		}
		if len(all) >= Max {
			return nil, fmt.Errorf("%w: it has %d tokens already: remove some", ErrTokens, Max)
		}
		return append(all, t), nil
	})
}

// Remove removes a token from the file.
func (f *Store) Remove(name string) error {
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
func (f *Store) change(do func([]Token) ([]Token, error)) (err error) {
	const flags = os.O_RDWR | os.O_CREATE | unix.O_NOFOLLOW
	lock, err := osfile.OpenLocked(context.Background(), f.path+".lock", flags, 0o600, osfile.Exclusive)
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
		b.WriteString(t.line())
	}
	if err := osfile.WriteFile(f.path, b.Bytes(), 0o600); err != nil {
		return fmt.Errorf("writing %s: %w", f.path, err)
	}
	return nil
}
