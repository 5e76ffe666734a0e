package control

import (
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
)

// Tail keeps the end of what is written to it.
type Tail struct {
	mu   sync.Mutex
	text []byte
}

const maxTail = 4 << 10

// Write implements io.Writer.
func (t *Tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.text = append(t.text, p...)
	if over := len(t.text) - maxTail; over > 0 {
		t.text = append(t.text[:0], t.text[over:]...)
	}
	return len(p), nil
}

// Last returns the last line.
func (t *Tail) Last() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	lines := bytes.Split(bytes.TrimSpace(t.text), []byte("\n"))
	return string(lines[len(lines)-1])
}

// maxLastLine is how many bytes at the end of a file LastLine reads.
const maxLastLine = 4 << 10

// LastLine returns the last line of a file, or "". It returns only the end of a long line.
func LastLine(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	text := make([]byte, min(st.Size(), maxLastLine))
	n, err := f.ReadAt(text, st.Size()-int64(len(text)))
	if err != nil && !errors.Is(err, io.EOF) {
		return ""
	}
	t := Tail{text: text[:n]}
	return t.Last()
}
