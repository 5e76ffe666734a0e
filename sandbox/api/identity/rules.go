package identity

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"go.yaml.in/yaml/v3"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/sandbox/api/tokens"
)

// Bounds of the file.
const (
	maxFile    = 256 << 10 // bytes
	maxIssuers = 16
	maxRules   = 1000 // of one issuer
	maxPattern = 512  // bytes
	maxStreams = 24 * time.Hour
)

// CertificateSource is the name of client certificates, where an issuer has its own.
const CertificateSource = "cert"

// config is the content of the file.
type config struct {
	Issuers      []source `yaml:"issuers"`
	Certificates *source  `yaml:"certificates"`
}

// A source is an issuer, or the authority of client certificates, which has rules alone.
type source struct {
	// Name stands before the subject in the names of callers, and before owners that are taken from a claim.
	Name string `yaml:"name"`
	// URL is the issuer, exactly as in its tokens. Audience is what its tokens must be for.
	URL      string `yaml:"url"`
	Audience string `yaml:"audience"`
	// CA is a PEM file of the authority of the issuer's own certificate; empty is the system's.
	CA string `yaml:"ca"`
	// Keys is a file with the issuer's JSON Web Key Set, or its https URL; empty is found by discovery.
	Keys string `yaml:"keys"`
	// Rules are tried in order. The first that matches applies.
	Rules []rule `yaml:"rules"`
}

// A rule grants an identity an owner and scopes.
type rule struct {
	// Match has a pattern for each claim that it wants.
	Match map[string]pattern `yaml:"match"`
	// One of Owner, a name; OwnerFrom, a claim whose value becomes the owner "SOURCE/VALUE"; and AllOwners.
	Owner     string `yaml:"owner"`
	OwnerFrom string `yaml:"owner_from"`
	AllOwners bool   `yaml:"all_owners"`
	// Scopes are granted; with ScopesFrom, those of them that this claim names.
	Scopes     string `yaml:"scopes"`
	ScopesFrom string `yaml:"scopes_from"`
	// Rate is how many requests each identity has a second; 0 is no limit.
	Rate int `yaml:"rate"`
	// Streams is how long what has begun may run on after the identity has expired.
	Streams time.Duration `yaml:"streams"`

	scopes tokens.Scopes
}

// A pattern matches a value of a claim. "*" stands for one or more characters but "/" and ":", which separate the
// parts of names, and "**" at the end for one or more of any.
type pattern struct {
	text string
	is   *regexp.Regexp // nil if text has no "*"
}

// UnmarshalYAML reads a pattern.
func (p *pattern) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind != yaml.ScalarNode {
		return fmt.Errorf("line %d: a pattern is a text", n.Line)
	}
	var err error
	if *p, err = newPattern(n.Value); err != nil {
		return fmt.Errorf("line %d: %w", n.Line, err)
	}
	return nil
}

func newPattern(text string) (pattern, error) {
	p := pattern{text: text}
	if len(text) > maxPattern {
		return p, fmt.Errorf("a pattern of %d bytes: use %d at most", len(text), maxPattern)
	}
	if !strings.Contains(text, "*") {
		return p, nil
	}
	body, open := strings.CutSuffix(text, "**")
	if strings.Contains(body, "**") || open && strings.HasSuffix(body, "*") {
		return p, fmt.Errorf("the pattern %q: use ** at its end only", text)
	}
	expr := strings.ReplaceAll(regexp.QuoteMeta(body), `\*`, `[^/:]+`)
	if open {
		expr += `.+`
	}
	var err error
	p.is, err = regexp.Compile(`\A(?s:` + expr + `)\z`)
	return p, err
}

func (p pattern) matches(value string) bool {
	if p.is == nil {
		return value == p.text
	}
	return p.is.MatchString(value)
}

var sourceName = lazyregexp.New(`^[a-z0-9][a-z0-9.-]{0,31}$`)

// parse reads the content of a file.
func parse(text []byte) (*config, error) {
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	c := &config{}
	if err := d.Decode(c); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if err := d.Decode(&yaml.Node{}); !errors.Is(err, io.EOF) {
		return nil, errors.New("it has more than one document")
	}
	if len(c.Issuers) > maxIssuers {
		return nil, fmt.Errorf("it has more than %d issuers", maxIssuers)
	}
	names, urls := map[string]bool{CertificateSource: true}, map[string]bool{}
	for i := range c.Issuers {
		s := &c.Issuers[i]
		switch err := s.check(); {
		case err != nil:
			return nil, fmt.Errorf("issuer %q: %w", s.Name, err)
		case names[s.Name]:
			return nil, fmt.Errorf("issuer %q: the name is taken", s.Name)
		case urls[s.URL]:
			return nil, fmt.Errorf("issuer %q: another one has the URL", s.Name)
		}
		names[s.Name], urls[s.URL] = true, true
	}
	if s := c.Certificates; s != nil {
		if s.Name != "" || s.URL != "" || s.Audience != "" || s.CA != "" || s.Keys != "" {
			return nil, errors.New("certificates have rules alone: their authority is that of --client-ca")
		}
		s.Name = CertificateSource
		if err := s.checkRules(); err != nil {
			return nil, fmt.Errorf("certificates: %w", err)
		}
	}
	return c, nil
}

func (s *source) check() error {
	switch {
	case !sourceName.MatchString(s.Name):
		return errors.New("use lower-case letters, digits, dots and hyphens in its name, 32 at most")
	case s.Audience == "":
		return errors.New("it has no audience, which tells tokens for this server from all others")
	case s.CA != "" && !filepath.IsAbs(s.CA):
		return errors.New("ca is no absolute path")
	case s.Keys != "" && !filepath.IsAbs(s.Keys) && secureURL(s.Keys) != nil:
		return errors.New("keys is neither an https URL nor an absolute path")
	}
	if err := secureURL(s.URL); err != nil {
		return fmt.Errorf("its url: %w", err)
	}
	return s.checkRules()
}

// secureURL checks that a URL is one that can be asked for keys.
func secureURL(text string) error {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "https" || u.Host == "" || u.User != nil {
		return fmt.Errorf("%.200q is no https URL", text)
	}
	return nil
}

func (s *source) checkRules() error {
	if len(s.Rules) > maxRules {
		return fmt.Errorf("it has more than %d rules", maxRules)
	}
	for i := range s.Rules {
		if err := s.Rules[i].check(); err != nil {
			return fmt.Errorf("rule %d: %w", i+1, err)
		}
	}
	return nil
}

func (r *rule) check() (err error) {
	owners := 0
	for _, given := range []bool{r.Owner != "", r.OwnerFrom != "", r.AllOwners} {
		if given {
			owners++
		}
	}
	for claim, p := range r.Match {
		if p.text == "" { // also a null, which no method reads
			return fmt.Errorf("the pattern for %q is empty", claim)
		}
	}
	switch {
	case len(r.Match) == 0:
		return errors.New("it has no match, and would be for everybody whom the issuer knows")
	case owners != 1:
		return errors.New("use one of owner, owner_from and all_owners")
	case r.Streams != 0 && r.Streams < time.Second || r.Streams > maxStreams:
		return fmt.Errorf("use a duration of %v at most for streams, such as 6h", maxStreams)
	}
	if r.scopes, err = tokens.ParseScopes(r.Scopes); err != nil {
		return errors.New(strings.TrimPrefix(err.Error(), tokens.ErrTokens.Error()+": "))
	}
	as := tokens.Token{Name: "rule", Scopes: r.scopes, Owner: r.Owner, Rate: r.Rate}
	if r.OwnerFrom != "" {
		as.Owner = r.OwnerFrom // any, for the check of its scopes
	}
	return as.Check()
}

// claims are what an issuer says of an identity.
type claims map[string]any

// values returns the texts of a claim. A name that begins with a slash is a JSON pointer (RFC 6901).
func (c claims) values(name string) (out []string) {
	v, ok := any(nil), false
	if path, is := strings.CutPrefix(name, "/"); is {
		v, ok = map[string]any(c), true
		for part := range strings.SplitSeq(path, "/") {
			m, _ := v.(map[string]any)
			v, ok = m[strings.NewReplacer("~1", "/", "~0", "~").Replace(part)]
		}
	} else {
		v, ok = c[name]
	}
	if !ok {
		return nil
	}
	all, ok := v.([]any)
	if !ok {
		all = []any{v}
	}
	for _, v := range all {
		switch v := v.(type) {
		case string:
			out = append(out, v)
		case bool, json.Number:
			out = append(out, fmt.Sprint(v))
		}
	}
	return out
}

// readClaims reads the payload of a token whose signature is good. Names that differ from those of the standard by
// case alone are refused: parsers disagree about which counts.
func readClaims(payload []byte) (claims, error) {
	d := json.NewDecoder(bytes.NewReader(payload))
	d.UseNumber()
	var c claims
	if err := d.Decode(&c); err != nil {
		return nil, err
	}
	for name := range c {
		for _, known := range []string{"iss", "sub", "aud", "exp", "nbf", "iat", "_claim_names", "_claim_sources"} {
			if strings.EqualFold(name, known) && name != known {
				return nil, fmt.Errorf("a claim %.40q beside %q", name, known)
			}
		}
	}
	return c, nil
}

// grant returns the owner and scopes of an identity by the first rule that matches. The error says what is missing.
func (s *source) grant(c claims) (r *rule, owner string, scopes tokens.Scopes, err error) {
	i := slices.IndexFunc(s.Rules, func(r rule) bool {
		for name, p := range r.Match {
			if !slices.ContainsFunc(c.values(name), p.matches) {
				return false
			}
		}
		return true
	})
	if i < 0 {
		return nil, "", nil, errors.New("no rule is for it")
	}
	r = &s.Rules[i]
	owner, scopes = r.Owner, r.scopes
	if r.OwnerFrom != "" {
		values := c.values(r.OwnerFrom)
		if len(values) != 1 || values[0] == "" || strings.ContainsRune(values[0], utf8.RuneError) {
			return nil, "", nil, fmt.Errorf("rule %d takes the owner from %q, which is not one text", i+1, r.OwnerFrom)
		}
		owner = s.Name + "/" + values[0]
		as := tokens.Token{Name: "rule", Scopes: scopes, Owner: owner}
		if as.Check() != nil {
			return nil, "", nil, fmt.Errorf("rule %d takes the owner from %q, which is too long or not printable", i+1, r.OwnerFrom)
		}
	}
	if r.ScopesFrom != "" {
		var named []string
		for _, v := range c.values(r.ScopesFrom) {
			named = append(named, strings.FieldsFunc(v, func(r rune) bool { return r == ' ' || r == ',' })...)
		}
		scopes = slices.DeleteFunc(slices.Clone(scopes), func(s tokens.Scope) bool { return !slices.Contains(named, string(s)) })
		if len(scopes) == 0 {
			return nil, "", nil, fmt.Errorf("rule %d grants what %q names of %s, and that is nothing", i+1, r.ScopesFrom, r.scopes)
		}
	}
	return r, owner, scopes, nil
}
