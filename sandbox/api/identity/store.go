package identity

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/coreos/go-oidc/v3/oidc"
	"github.com/go-jose/go-jose/v4"
	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"

	"github.com/drowse-vm/drowse/sandbox/api/tokens"
)

// Bounds of identities.
const (
	maxToken   = 16 << 10 // bytes of a JSON Web Token
	maxSubject = 255      // bytes (OpenID Connect Core 1.0, section 2)
	maxRates   = 4096     // identities whose rate is counted at once
)

// RetryAfter is when to try again after ErrIssuer.
const RetryAfter = keysPause

// Errors of identities. Others are tokens.ErrUnknown, ErrExpired and ErrRate.
var (
	// ErrConfig means that the file cannot be used. Until it can, it lets nobody in.
	ErrConfig = errors.New("the file of identities cannot be used")
	// ErrUnmapped means that an identity is known, and that no rule grants it anything.
	ErrUnmapped = errors.New("the identity may do nothing here")
	// ErrIssuer means that the keys of a token's issuer are not known, and are not to be had now.
	ErrIssuer = errors.New("the issuer of the token does not answer")
)

// refusal is an error with a text of its own.
type refusal struct {
	kind error
	text string
}

func (r *refusal) Error() string { return r.text }
func (r *refusal) Unwrap() error { return r.kind }

func refuse(kind error, format string, args ...any) error {
	return &refusal{kind, fmt.Sprintf(format, args...)}
}

// Identity is a caller. One whom an issuer or an authority vouches for is like a token without a secret: Name is that
// of its source and its escaped subject, with a colon between them; Hash tells it from others of that name.
type Identity struct {
	tokens.Token
	from   origin              // of its source; empty for a token of the file
	claims []byte              // JSON
	chain  []*x509.Certificate // that was shown
	at     time.Time           // when it was admitted
}

// Vouched reports whether an issuer or an authority vouches for the identity.
func (i Identity) Vouched() bool { return i.from != origin{} }

// Options configure Open.
type Options struct {
	// File has issuers and rules. It must exist. It is read again when it has changed.
	File string
	// ClientCA is a PEM file with the authorities of client certificates; empty if there are none. It is read again
	// when it has changed; while it cannot be used, the old authorities count.
	ClientCA string
	// Log gets errors of issuers and files; nil discards them.
	Log *slog.Logger
}

// Store admits callers. A nil Store knows no identities. Its methods may be called from any goroutine. End it with
// Close.
type Store struct {
	o    Options
	log  *slog.Logger
	now  func() time.Time
	life context.Context // ends with Close
	end  context.CancelFunc

	closing sync.Mutex // guards closed
	closed  bool
	all     sync.WaitGroup // requests to issuers

	mu      sync.Mutex // guards what follows
	seen    stamp
	config  *config
	err     error // of the file as it is
	issuers map[place]*issuer
	cas     authorities
	rates   map[[sha256.Size]byte]*rate.Limiter
	swept   time.Time
}

// Open reads the files.
func Open(o Options) (*Store, error) {
	s := &Store{o: o, log: o.Log, now: time.Now, issuers: map[place]*issuer{}, rates: map[[sha256.Size]byte]*rate.Limiter{}}
	if s.log == nil {
		s.log = slog.New(slog.DiscardHandler)
	}
	s.life, s.end = context.WithCancel(context.Background())
	c, err := s.current()
	if err == nil && o.ClientCA != "" {
		err = s.cas.read(o.ClientCA)
		if err == nil && c.Certificates == nil {
			err = fmt.Errorf("%w: there is an authority of client certificates, and %s has no rules for certificates", ErrConfig, o.File)
		}
	}
	if err != nil {
		s.end()
		return nil, err
	}
	return s, nil
}

// Close ends requests to issuers.
func (s *Store) Close() {
	if s == nil {
		return
	}
	s.closing.Lock()
	s.closed = true
	s.closing.Unlock()
	s.end()
	s.all.Wait()
}

// work runs f in a goroutine, unless the store is closed.
func (s *Store) work(f func()) bool {
	s.closing.Lock()
	defer s.closing.Unlock()
	if !s.closed {
		s.all.Go(f)
	}
	return !s.closed
}

// stamp tells whether a file has changed.
type stamp struct {
	info os.FileInfo
	at   time.Time // when it was read
}

// sameAs reports whether a file is as it was read. One that was read within a second of a change may have changed
// since within the resolution of its time.
func (s stamp) sameAs(info os.FileInfo) bool {
	return s.info != nil && os.SameFile(s.info, info) && s.info.Size() == info.Size() && s.info.Mode() == info.Mode() &&
		s.info.ModTime().Equal(info.ModTime()) && s.at.Sub(info.ModTime()).Abs() > time.Second
}

// current returns the content of the file as it is now.
func (s *Store) current() (*config, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	info, err := os.Stat(s.o.File)
	if err != nil {
		return nil, s.broken(err)
	}
	if s.config != nil && s.seen.sameAs(info) {
		return s.config, nil
	}
	s.seen = stamp{info, time.Now()}
	text, err := readTrusted(s.o.File, maxFile)
	var c *config
	if err == nil {
		if c, err = parse(text); err != nil {
			err = fmt.Errorf("%s: %w", s.o.File, err)
		}
	}
	if err != nil {
		return nil, s.broken(err)
	}
	s.config, s.err = c, nil
	for at := range s.issuers {
		if !slices.ContainsFunc(c.Issuers, func(s source) bool { return s.place() == at }) {
			delete(s.issuers, at)
		}
	}
	return c, nil
}

// broken notes that the file cannot be used. The caller holds mu.
func (s *Store) broken(err error) error {
	err = fmt.Errorf("%w: %w", ErrConfig, err)
	if s.config != nil || s.err == nil || s.err.Error() != err.Error() {
		s.log.Error("no identity is let in", "error", err)
	}
	s.config, s.err = nil, err
	return err
}

// readTrusted reads a file of a bounded size that nobody but its owner may write: who writes it lets anybody in.
func readTrusted(path string, most int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return nil, fmt.Errorf("%s is not a file", path)
	case st.Mode&0o022 != 0:
		return nil, fmt.Errorf("others may write %s: take that away with `chmod go-w`", path)
	case st.Uid != 0 && int(st.Uid) != os.Geteuid():
		return nil, fmt.Errorf("%s belongs to user %d: give it to root", path, st.Uid)
	}
	text, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(text)) > most {
		err = fmt.Errorf("%s has more than %d bytes", path, most)
	}
	return text, err
}

// origin is what a source is apart from its rules.
type origin struct {
	place
	name, audience string
}

func (s *source) origin() origin { return origin{s.place(), s.Name, s.Audience} }

func (s *source) place() place { return place{s.URL, s.CA, s.Keys} }

// issuer returns the keys of an issuer, which stay while the file names it.
func (s *Store) issuer(at place) *issuer {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.issuers[at]
	if i == nil {
		i = &issuer{place: at, s: s}
		s.issuers[at] = i
	}
	return i
}

// Admit admits who shows a token: one of the file of tokens, or a JSON Web Token of an issuer. It counts as one
// request; with tokens.ErrRate, wait says when to try again. The identity has a name if an error is about a known one.
func (s *Store) Admit(ctx context.Context, known *tokens.Store, shown string) (id Identity, wait time.Duration, err error) {
	id.Token, wait, err = known.Admit(shown)
	if s == nil || err == nil || errors.Is(err, tokens.ErrExpired) || errors.Is(err, tokens.ErrRate) || !isJWT(shown) {
		return id, wait, err
	}
	if id, err = s.verify(ctx, shown); err != nil {
		return id, 0, err
	}
	wait, err = s.spend(&id)
	return id, wait, err
}

// isJWT reports whether a text has the form of a signed JSON Web Token (RFC 7515, section 7.1), whose header is an
// object.
func isJWT(text string) bool { return strings.HasPrefix(text, "eyJ") && strings.Count(text, ".") == 2 }

// verify checks a JSON Web Token.
func (s *Store) verify(ctx context.Context, text string) (id Identity, err error) {
	unknown := func(format string, args ...any) (Identity, error) {
		return id, refuse(tokens.ErrUnknown, "the token is refused: %s", cut(fmt.Sprintf(format, args...)))
	}
	if len(text) > maxToken {
		return unknown("it has %d bytes, and %d are possible", len(text), maxToken)
	}
	c, err := s.current()
	if err != nil {
		return id, err
	}
	jws, err := jose.ParseSignedCompact(text, algorithms)
	if err != nil {
		return unknown("%v", err)
	}
	header := jws.Signatures[0].Header
	if kind, _ := header.ExtraHeaders[jose.HeaderType].(string); !isTokenType(kind) {
		return unknown("its type is %.40q", kind)
	}
	var says struct {
		Issuer string `json:"iss"`
	}
	if err := json.Unmarshal(jws.UnsafePayloadWithoutVerification(), &says); err != nil {
		return unknown("its claims are not JSON")
	}
	at := slices.IndexFunc(c.Issuers, func(i source) bool { return i.URL == says.Issuer })
	if at < 0 {
		return unknown("the server knows no issuer %.200q", says.Issuer)
	}
	from := &c.Issuers[at]
	keys, err := s.issuer(from.place()).keysFor(ctx, header.KeyID, header.Algorithm)
	switch {
	case errors.Is(err, errKey):
		return unknown("%v", err)
	case err != nil:
		return id, refuse(ErrIssuer, "the issuer %s of the token does not answer, and its keys are not known", from.Name)
	}
	set := &oidc.StaticKeySet{}
	for _, k := range keys {
		set.PublicKeys = append(set.PublicKeys, k)
	}
	o := &oidc.Config{ClientID: from.Audience, SupportedSigningAlgs: []string{header.Algorithm}, Now: s.now}
	token, err := oidc.NewVerifier(from.URL, set, o).Verify(ctx, text)
	late, expired := errors.AsType[*oidc.TokenExpiredError](err)
	switch {
	case expired:
		return id, refuse(tokens.ErrExpired, "the token of %s has expired at %s", from.Name, late.Expiry.UTC().Format(time.RFC3339))
	case err != nil:
		return unknown("%v", err)
	}
	var payload json.RawMessage
	if err := token.Claims(&payload); err != nil {
		return unknown("%v", err)
	}
	said, err := readClaims(payload)
	if err != nil {
		return unknown("%v", err)
	}
	id = Identity{Token: tokens.Token{Expires: token.Expiry}, claims: payload}
	return id, s.name(&id, from, token.Subject, said)
}

// isTokenType reports whether the type of a JSON Web Token is none, or one that is for access (RFC 8725, section 3.11).
// Logout tokens, and others of the same issuer, say another.
func isTokenType(kind string) bool {
	switch strings.TrimPrefix(strings.ToLower(kind), "application/") {
	case "", "jwt", "at+jwt":
		return true
	}
	return false
}

// name names an identity that has been verified, and grants what it may do.
func (s *Store) name(id *Identity, from *source, subject string, said claims) error {
	if subject == "" || len(subject) > maxSubject || strings.ContainsRune(subject, utf8.RuneError) {
		return refuse(tokens.ErrUnknown, "the identity is refused: its subject is not a text of 1 to %d bytes", maxSubject)
	}
	id.Name = from.Name + ":" + escape(subject)
	id.Hash = sha256.Sum256(fmt.Appendf(nil, "%q %q %q", from.URL, from.Name, subject))
	id.at, id.from = s.now(), from.origin()
	r, owner, scopes, err := from.grant(said)
	if err != nil {
		return refuse(ErrUnmapped, "%s may do nothing here: %v", id.Name, err)
	}
	id.Owner, id.Scopes, id.Rate = owner, scopes, r.Rate
	return nil
}

// escape returns a text in which everything but printable ASCII without spaces, and the percent sign, is %XX.
func escape(text string) string {
	var out strings.Builder
	for _, b := range []byte(text) {
		if b <= ' ' || b > '~' || b == '%' {
			fmt.Fprintf(&out, "%%%02X", b)
		} else {
			out.WriteByte(b)
		}
	}
	return out.String()
}

// cut bounds a text that may quote a stranger's.
func cut(text string) string {
	text = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, text)
	return fmt.Sprintf("%.*s", maxCause, text)
}

// spend counts a request of an identity.
func (s *Store) spend(id *Identity) (wait time.Duration, err error) {
	if id.Rate == 0 {
		return 0, nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	l := s.rates[id.Hash]
	if l == nil || l.Burst() != id.Rate {
		if l == nil && len(s.rates) >= maxRates && now.Sub(s.swept) >= time.Second {
			s.swept = now
			for hash, l := range s.rates {
				if l.TokensAt(now) >= float64(l.Burst()) {
					delete(s.rates, hash) // it is as if it had never been used
				}
			}
		}
		if l == nil && len(s.rates) >= maxRates {
			return time.Second, tokens.ErrRate
		}
		l = rate.NewLimiter(rate.Limit(id.Rate), id.Rate)
		s.rates[id.Hash] = l
	}
	r := l.ReserveN(now, 1)
	if wait = r.DelayFrom(now); wait > 0 {
		r.CancelAt(now)
		return wait, tokens.ErrRate
	}
	return 0, nil
}

// Valid returns tokens.ErrUnknown if what an identity was admitted by is gone or grants other rights now, and
// tokens.ErrExpired if it has expired: for what runs long, which a rule may let outlive the identity.
func (s *Store) Valid(known *tokens.Store, id Identity) error {
	if !id.Vouched() {
		return known.Valid(id.Token)
	}
	c, err := s.current()
	if err != nil {
		return err
	}
	from := c.Certificates
	if id.chain == nil {
		at := slices.IndexFunc(c.Issuers, func(i source) bool { return i.origin() == id.from })
		if from = nil; at >= 0 {
			from = &c.Issuers[at]
		}
	}
	if from == nil {
		return refuse(tokens.ErrUnknown, "the server no longer knows the issuer of %s", id.Name)
	}
	if id.chain != nil {
		if err := s.trusted(id.chain, id.at); err != nil {
			return err
		}
	}
	said, err := readClaims(id.claims)
	if err != nil {
		return err
	}
	r, owner, scopes, err := from.grant(said)
	switch {
	case err != nil || owner != id.Owner || !slices.Equal(scopes, id.Scopes):
		return refuse(tokens.ErrUnknown, "the rules no longer grant %s what it had", id.Name)
	case !s.now().Before(id.Expires.Add(r.Streams)):
		return refuse(tokens.ErrExpired, "%s has expired", id.Name)
	}
	return nil
}
