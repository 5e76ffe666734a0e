package main

import (
	"bytes"
	"io"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/spf13/cobra"
)

// screen writes text to a terminal without control characters. Guests choose parts of the text, in logs, names,
// metadata and errors. Unfiltered, these could move the cursor, change the title, answer for the user or hide
// text. Any goroutine may call its methods.
type screen struct {
	w io.Writer // the terminal

	mu   sync.Mutex
	held []byte // the start of a character, or one carriage return in place of several: fewer than utf8.UTFMax bytes
}

// onScreen returns w, or a screen on w if it is a terminal.
func onScreen(w io.Writer) io.Writer {
	if isTerminal(w) {
		return &screen{w: w}
	}
	return w
}

// raw returns the writer behind a screen. Some output may drive the terminal, such as that of a command that the
// user runs in a guest, as with ssh.
func raw(w io.Writer) io.Writer {
	if s, ok := w.(*screen); ok {
		return s.w
	}
	return w
}

// lineEnds replaces the line ends of a console, which is a terminal itself.
var lineEnds = strings.NewReplacer("\r\r\n", "\n", "\r\n", "\n")

// Write implements io.Writer. It replaces control characters.
func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	text := append(s.held, p...)
	whole := len(text) - incomplete(text)
	s.held = append([]byte(nil), text[whole:min(len(text), whole+utf8.UTFMax-1)]...)
	if len(s.held) > 0 && s.held[0] == '\r' {
		s.held = s.held[:1]
	}
	if _, err := io.WriteString(s.w, printable(lineEnds.Replace(string(text[:whole])))); err != nil {
		return 0, err
	}
	return len(p), nil
}

// incomplete returns how many bytes at the end of a text make sense only with the next ones.
func incomplete(text []byte) int {
	n := len(text)
	if before := len(bytes.TrimRight(text, "\r")); before < n {
		return n - before
	}
	for i := n - 1; i >= max(0, n-utf8.UTFMax+1); i-- {
		if utf8.RuneStart(text[i]) {
			if !utf8.FullRune(text[i:]) {
				return n - i
			}
			break
		}
	}
	return 0
}

// endScreen writes what a screen still holds.
func endScreen(w io.Writer) {
	if s, ok := w.(*screen); ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		_, _ = io.WriteString(s.w, printable(string(s.held)))
		s.held = nil
	}
}

// logTo returns the writer for a guest's log.
func (a *app) logTo(asIs bool) io.Writer {
	if asIs {
		return raw(a.stdout)
	}
	return a.stdout
}

func rawFlag(cmd *cobra.Command, asIs *bool) {
	cmd.Flags().BoolVar(asIs, "raw", false, "do not replace control characters")
}

// logsRaw returns the long help of a command that prints a guest's output.
func logsRaw(what string) string {
	return what + `

On a terminal, control characters and invalid text are replaced by U+FFFD, since the guest chooses
them. With --raw, or if stdout is no terminal, bytes are unchanged.`
}
