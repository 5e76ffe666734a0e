package proxy

import (
	"io"
	"net/http"
	"strings"
)

// mask replaces each occurrence of a secret in a stream by as many asterisks. It holds back no more bytes than could
// be the beginning of one, which are those of the secret itself.
type mask struct {
	src    io.ReadCloser
	secret string
	// next is the longest proper prefix of the secret that ends its first i+1 bytes (Knuth, Morris and Pratt).
	next []int
	held int // so many bytes of the secret have been read and not given on
	out  []byte
	err  error
	in   [4096]byte
}

// newMask masks a secret, which is not empty.
func newMask(src io.ReadCloser, secret string) *mask {
	m := &mask{src: src, secret: secret, next: make([]int, len(secret))}
	for i, k := 1, 0; i < len(secret); i++ {
		for k > 0 && secret[i] != secret[k] {
			k = m.next[k-1]
		}
		if secret[i] == secret[k] {
			k++
		}
		m.next[i] = k
	}
	return m
}

// Read implements [io.Reader].
func (m *mask) Read(p []byte) (int, error) {
	for len(m.out) == 0 {
		if m.err != nil {
			return 0, m.err
		}
		n, err := m.src.Read(m.in[:])
		m.out = m.take(m.out[:0], m.in[:n])
		if err != nil {
			m.err = err
			m.out = append(m.out, m.secret[:m.held]...) // it was the beginning of something else
			m.held = 0
		}
	}
	n := copy(p, m.out)
	m.out = m.out[n:]
	return n, nil
}

func (m *mask) take(out, in []byte) []byte {
	for _, c := range in {
		for m.held > 0 && c != m.secret[m.held] {
			k := m.next[m.held-1]
			out = append(out, m.secret[:m.held-k]...)
			m.held = k
		}
		if c != m.secret[m.held] {
			out = append(out, c)
			continue
		}
		if m.held++; m.held == len(m.secret) {
			out = append(out, stars(len(m.secret))...)
			m.held = 0
		}
	}
	return out
}

// Close implements [io.Closer].
func (m *mask) Close() error { return m.src.Close() }

func stars(n int) string { return strings.Repeat("*", n) }

// maskHeader masks secrets in fields. A field that has one in its name is taken away.
func maskHeader(h http.Header, secrets []string) {
	for name, values := range h {
		for _, s := range secrets {
			if strings.Contains(strings.ToLower(name), strings.ToLower(s)) {
				delete(h, name)
			}
			for i, v := range values {
				values[i] = strings.ReplaceAll(v, s, stars(len(s)))
			}
		}
	}
}
