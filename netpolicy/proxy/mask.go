package proxy

import (
	"math/bits"
	"math/rand/v2"
	"net/http"
	"strings"
)

const (
	// minMasked is the length of the shortest secret that is masked, in bytes. A mask reveals to a party that
	// controls what a server says which of its texts is the secret. At 100 MB/s a connection carries all texts of
	// 8 digits in a second, all of 8 letters in 35 minutes, and all of 16 hexadecimal digits in 6,000 years.
	minMasked = 16
	// maxHeld is how many bytes a mask holds back at most: one less than the longest secret has.
	maxHeld = MaxSecret - 1
)

// mask replaces each byte of a secret in a streamed text by an asterisk. A server, or a guest that controls what a
// server says, learns from it only whether all of a secret was there: how much the mask holds back, and how much
// work it does, depend on the text alone.
//
// The mask holds back the end of the text after the last byte that no secret can have (CheckSecret), at most
// maxHeld bytes: it passes whole lines on. The search compares sums of the last bytes (Rabin and Karp) with those
// of the secrets. Each byte costs the same, whatever was found so far, unlike in searches that compare bytes.
type mask struct {
	needles []needle
	raw     []byte // the last MaxSecret bytes of the text, unmasked
	// shown is the end of the text, masked. The first gave bytes of it were passed on, the rest is held back.
	shown []byte
	gave  int
}

// needle is a secret to search for. Sums are polynomials over the field of 2^61-1 elements, at a random base.
type needle struct {
	text      string
	sum       uint64
	base, out uint64 // out is base^len(text): the weight of the byte that leaves
	now       uint64 // the sum of the last len(text) bytes
}

// newMask returns a mask of the secrets that are long enough; nil if there are no secrets. If none is long enough,
// it still holds back what every mask does, so that this reveals nothing of their length.
func newMask(secrets []string) *mask {
	if len(secrets) == 0 {
		return nil
	}
	m := &mask{raw: make([]byte, MaxSecret)} // zeros, which no secret contains
	base := 1<<32 + rand.Uint64N(field-1<<32)
	for _, s := range secrets {
		if len(s) < minMasked || len(s) > MaxSecret {
			continue
		}
		n := needle{text: s, base: base, out: 1}
		for i := range len(s) {
			n.sum = add(mul(n.sum, base), uint64(s[i]))
			n.out = mul(n.out, base)
		}
		m.needles = append(m.needles, n)
	}
	return m
}

// take takes the next piece of the text, and returns what can be passed on. The result is valid until the next call.
func (m *mask) take(p []byte) []byte {
	m.raw = append(m.raw, p...)
	m.shown = append(append(m.shown[:0], m.shown[m.gave:]...), p...)
	first := len(m.raw) - len(m.shown) // shown[0] is raw[first]
	for k := range m.needles {
		n := &m.needles[k]
		done := first
		for i := MaxSecret; i < len(m.raw); i++ {
			n.now = add(mul(n.now, n.base), uint64(m.raw[i]))
			n.now = add(n.now, field-mul(n.out, uint64(m.raw[i-len(n.text)])))
			if end := i + 1; n.now == n.sum && string(m.raw[end-len(n.text):end]) == n.text {
				for done = max(done, end-len(n.text)); done < end; done++ {
					m.shown[done-first] = '*'
				}
			}
		}
	}
	held := 0
	for held < min(len(m.shown), maxHeld) && visible(m.raw[len(m.raw)-1-held]) {
		held++
	}
	m.gave = len(m.shown) - held
	m.raw = m.raw[:copy(m.raw, m.raw[len(m.raw)-MaxSecret:])]
	return m.shown[:m.gave]
}

// rest releases and returns what was held back. It is valid until the next call.
func (m *mask) rest() []byte {
	p := m.shown[m.gave:]
	m.gave = len(m.shown)
	return p
}

// hide masks a complete text.
func (m *mask) hide(text string) string {
	// No secret has a line break, so nothing is held back, and no match spans two calls.
	p := m.take([]byte(text + "\n"))
	return string(p[:len(p)-1])
}

// maskHeader masks secrets in fields. It removes a field that has a secret in its name.
func maskHeader(h http.Header, secrets []string) {
	values := newMask(secrets)
	if values == nil {
		return
	}
	lower := make([]string, len(secrets))
	for i, s := range secrets {
		lower[i] = strings.ToLower(s)
	}
	names := newMask(lower)
	for name, list := range h {
		if low := strings.ToLower(name); names.hide(low) != low {
			delete(h, name)
		}
		for i, v := range list {
			list[i] = values.hide(v)
		}
	}
}

// visible reports whether a secret may contain a byte.
func visible(c byte) bool { return ' ' <= c && c <= '~' }

// field is the prime 2^61-1.
const field = 1<<61 - 1

// add adds two elements of the field.
func add(a, b uint64) uint64 { return reduce(a + b) }

// mul multiplies two elements of the field.
func mul(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a, b)
	return reduce(lo&field + (hi<<3 | lo>>61))
}

// reduce brings a number below 2^62 into the field.
func reduce(a uint64) uint64 {
	a = a&field + a>>61
	_, below := bits.Sub64(a, field, 0)
	return a - field&(below-1)
}
