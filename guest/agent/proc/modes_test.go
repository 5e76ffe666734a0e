package proc

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestApplyModes_changes_what_is_named_and_nothing_else(t *testing.T) {
	before := unix.Termios{Iflag: unix.ICRNL | unix.IXON, Lflag: unix.ECHO | unix.ICANON, Oflag: unix.OPOST, Cflag: unix.CS8}
	before.Cc[unix.VINTR] = 3
	before.Cc[unix.VQUIT] = 28
	for name, tt := range map[string]struct {
		modes []byte
		want  func(*unix.Termios)
	}{
		"nothing":      {nil, func(*unix.Termios) {}},
		"an end":       {[]byte{0, 53, 0, 0, 0, 0}, func(*unix.Termios) {}},
		"a character":  {[]byte{1, 0, 0, 0, 7, 0}, func(t *unix.Termios) { t.Cc[unix.VINTR] = 7 }},
		"no character": {[]byte{2, 0, 0, 0, 255, 0}, func(t *unix.Termios) { t.Cc[unix.VQUIT] = 0 }},
		"echo off":     {[]byte{53, 0, 0, 0, 0, 0}, func(t *unix.Termios) { t.Lflag &^= unix.ECHO }},
		"UTF-8 on":     {[]byte{42, 0, 0, 0, 1}, func(t *unix.Termios) { t.Iflag |= unix.IUTF8 }},
		"newlines as they are": {[]byte{70, 0, 0, 0, 0, 36, 0, 0, 0, 0, 0}, func(t *unix.Termios) {
			t.Oflag &^= unix.OPOST
			t.Iflag &^= unix.ICRNL
		}},
		"seven bits":                  {[]byte{90, 0, 0, 0, 1, 91, 0, 0, 0, 0, 0}, func(t *unix.Termios) { t.Cflag = t.Cflag&^unix.CSIZE | unix.CS7 }},
		"a speed and what is unknown": {[]byte{128, 0, 0, 0x96, 0, 129, 0, 0, 0x96, 0, 99, 0, 0, 0, 1, 0}, func(*unix.Termios) {}},
		"an opcode of the future":     {[]byte{200, 1, 53, 0, 0, 0, 0}, func(*unix.Termios) {}},
	} {
		got, want := before, before
		tt.want(&want)
		if err := applyModes(&got, tt.modes); err != nil || got != want {
			t.Errorf("%s: got %+v, %v, want %+v", name, got, err, want)
		}
	}
	for name, modes := range map[string][]byte{"cut off": {53, 0, 0}, "too long": make([]byte, 2000)} {
		got := before
		if err := applyModes(&got, modes); !errors.Is(err, errModes) {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func FuzzApplyModes(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 7, 53, 0, 0, 0, 0, 0})
	f.Add([]byte{90, 0, 0, 0, 1, 200})
	f.Fuzz(func(t *testing.T, p []byte) {
		var m unix.Termios
		_ = applyModes(&m, p)
	})
}
