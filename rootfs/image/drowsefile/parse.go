package drowsefile

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
)

// Limits of a file.
const (
	MaxFile         = 1 << 20 // bytes
	maxInstructions = 1024
	maxHeredocs     = 16  // of one instruction
	maxQuoted       = 100 // bytes of a quotation in an error
)

// ErrSyntax means that a file is malformed, or uses something unsupported. Errors name line and instruction.
var ErrSyntax = errors.New("bad build file")

// Error is an error in a line.
type Error struct {
	Line        int    // counted from 1
	Instruction string // in upper case; "" if the line has none
	Problem     string
}

// Error implements error.
func (e *Error) Error() string {
	if e.Instruction == "" {
		return fmt.Sprintf("%v: line %d: %s", ErrSyntax, e.Line, e.Problem)
	}
	return fmt.Sprintf("%v: line %d: %s: %s", ErrSyntax, e.Line, e.Instruction, e.Problem)
}

// Is implements errors.Is.
func (e *Error) Is(target error) bool { return target == ErrSyntax }

// Flag is --Name=Value after an instruction's name.
type Flag struct{ Name, Value string }

// Heredoc is a text that follows an instruction on lines of its own.
type Heredoc struct {
	Name   string // the word that ends it
	Expand bool   // variables in it are replaced
	Text   string
}

// Instruction is one instruction, its variables not yet replaced.
type Instruction struct {
	Line     int
	Name     string   // in upper case
	Flags    []Flag   // in order
	Rest     string   // the rest, with continuation lines joined
	List     []string // the rest, if it is a JSON array of strings; else nil
	Heredocs []Heredoc
}

func (i *Instruction) fail(format string, args ...any) error {
	return &Error{i.Line, i.Name, fmt.Sprintf(format, args...)}
}

// wrong is fail for an error that may be nil.
func (i *Instruction) wrong(err error) error {
	if err == nil {
		return nil
	}
	return i.fail("%v", err)
}

// File is a parsed file. Its first instruction other than ARG is FROM, and there is no other FROM.
type File struct {
	Instructions []Instruction
}

// known has the instructions, with the flags of each.
var known = map[string][]string{
	"FROM": nil, "RUN": nil, "ENV": nil, "ARG": nil, "WORKDIR": nil, "USER": nil, "ENTRYPOINT": nil, "CMD": nil,
	"LABEL": nil, "EXPOSE": nil, "STOPSIGNAL": nil,
	"COPY": {"chown", "chmod"}, "ADD": {"chown", "chmod"},
}

// listed are the instructions that may have a JSON array, and heredocs those that may have here-documents.
var (
	listed   = []string{"RUN", "CMD", "ENTRYPOINT", "COPY", "ADD"}
	heredocs = []string{"RUN", "COPY", "ADD"}
)

// Parse reads a file. The error is an *Error, which matches ErrSyntax.
func Parse(text string) (*File, error) {
	switch {
	case len(text) > MaxFile:
		return nil, &Error{1, "", fmt.Sprintf("the file has more than %d bytes", MaxFile)}
	case !utf8.ValidString(text):
		return nil, &Error{1, "", "the file is not UTF-8"}
	case strings.IndexByte(text, 0) >= 0:
		return nil, &Error{1, "", "the file has a zero byte"}
	}
	text = strings.TrimPrefix(text, "\ufeff")
	p := &parser{lines: strings.Split(strings.ReplaceAll(text, "\r\n", "\n"), "\n")}
	f := &File{}
	for {
		i, err := p.next()
		if err != nil {
			return nil, err
		}
		if i == nil {
			break
		}
		if len(f.Instructions) == maxInstructions {
			return nil, i.fail("the file has more than %d instructions", maxInstructions)
		}
		f.Instructions = append(f.Instructions, *i)
	}
	return f, f.check()
}

// check checks the file as a whole.
func (f *File) check() error {
	from := 0
	for n := range f.Instructions {
		i := &f.Instructions[n]
		switch {
		case i.Name == "FROM":
			if from++; from > 1 {
				return i.fail("a second FROM: builds of several stages are not supported")
			}
		case from == 0 && i.Name != "ARG":
			return i.fail("it stands before FROM, where only ARG may")
		}
	}
	if from == 0 {
		return &Error{1, "", "there is no FROM, which says what to begin with"}
	}
	return nil
}

type parser struct {
	lines []string
	at    int // index of the next line
}

var (
	instructionRE = lazyregexp.New(`^[A-Za-z]+$`)
	flagRE        = lazyregexp.New(`^--([a-z][a-z-]*)(=(.*))?$`)
	directiveRE   = lazyregexp.New(`^#\s*escape\s*=\s*(\S*)\s*$`)
	heredocRE     = lazyregexp.New(`^[0-9]*<<(-?)(?:"([A-Za-z_][A-Za-z0-9_.-]*)"|'([A-Za-z_][A-Za-z0-9_.-]*)'|([A-Za-z_][A-Za-z0-9_.-]*))$`)
)

// next reads an instruction with all its lines; nil at the end.
func (p *parser) next() (*Instruction, error) {
	for p.at < len(p.lines) {
		line := strings.TrimSpace(p.lines[p.at])
		if m := directiveRE.FindStringSubmatch(strings.ToLower(line)); m != nil && m[1] != `\` && p.at == 0 {
			return nil, &Error{1, "", "another escape character than \\ is not supported"}
		}
		if line != "" && line[0] != '#' {
			break
		}
		p.at++
	}
	if p.at == len(p.lines) {
		return nil, nil
	}
	i := &Instruction{Line: p.at + 1}
	text := p.logical()
	name, rest := cutSpace(text)
	if !instructionRE.MatchString(name) {
		return nil, i.fail("%s is no instruction", quoted(name))
	}
	i.Name = strings.ToUpper(name)
	flags, ok := known[i.Name]
	if !ok {
		return nil, i.fail("this instruction is not supported; supported are ADD, ARG, CMD, COPY, ENTRYPOINT, ENV, EXPOSE, FROM, LABEL, RUN, STOPSIGNAL, USER and WORKDIR")
	}
	var err error
	if i.Rest, err = i.takeFlags(rest, flags); err != nil {
		return nil, err
	}
	if i.Rest == "" {
		return nil, i.fail("nothing follows it")
	}
	if slices.Contains(listed, i.Name) && strings.HasPrefix(i.Rest, "[") {
		// If it is not a JSON array, it is a shell command: [ -f x ] && y.
		var list []string
		if json.Unmarshal([]byte(i.Rest), &list) == nil && list != nil {
			i.List = list
		}
	}
	if i.List == nil && slices.Contains(heredocs, i.Name) {
		return i, p.heredocs(i)
	}
	return i, nil
}

// logical joins a line with its continuation lines. It leaves out comments and empty lines among them.
func (p *parser) logical() string {
	var b strings.Builder
	for first := true; p.at < len(p.lines); first = false {
		line := p.lines[p.at]
		p.at++
		trimmed := strings.TrimSpace(line)
		if !first && (trimmed == "" || trimmed[0] == '#') {
			continue
		}
		end := strings.TrimRight(line, " \t")
		if !strings.HasSuffix(end, `\`) {
			b.WriteString(line)
			break
		}
		b.WriteString(strings.TrimSuffix(end, `\`))
	}
	return strings.TrimSpace(b.String())
}

func cutSpace(s string) (before, after string) {
	at := strings.IndexAny(s, " \t")
	if at < 0 {
		return s, ""
	}
	return s[:at], strings.TrimLeft(s[at:], " \t")
}

// takeFlags removes the flags from the text after an instruction's name.
func (i *Instruction) takeFlags(rest string, may []string) (string, error) {
	// For FROM and for a shell command, too, a word that begins so is a flag.
	for strings.HasPrefix(rest, "--") {
		word, after := cutSpace(rest)
		m := flagRE.FindStringSubmatch(word)
		if m == nil {
			return "", i.fail("%s is no flag", quoted(word))
		}
		if !slices.Contains(may, m[1]) {
			return "", i.fail("the flag --%s is not supported", m[1])
		}
		if m[3] == "" {
			return "", i.fail("--%s has no value: use --%s=VALUE", m[1], m[1])
		}
		if slices.ContainsFunc(i.Flags, func(f Flag) bool { return f.Name == m[1] }) {
			return "", i.fail("--%s is given twice", m[1])
		}
		i.Flags = append(i.Flags, Flag{m[1], m[3]})
		rest = after
	}
	return rest, nil
}

// heredocs reads the texts that the words of an instruction announce.
func (p *parser) heredocs(i *Instruction) error {
	for _, word := range shellWords(i.Rest) {
		m := heredocRE.FindStringSubmatch(word)
		if m == nil {
			continue
		}
		if len(i.Heredocs) == maxHeredocs {
			return i.fail("it has more than %d texts", maxHeredocs)
		}
		h := Heredoc{Name: m[2] + m[3] + m[4], Expand: m[4] != ""}
		var b strings.Builder
		for {
			if p.at == len(p.lines) {
				return i.fail("the text that ends at a line %q has no such line", h.Name)
			}
			line := p.lines[p.at]
			p.at++
			if m[1] == "-" {
				line = strings.TrimLeft(line, "\t")
			}
			if line == h.Name {
				break
			}
			b.WriteString(line + "\n")
		}
		h.Text = b.String()
		i.Heredocs = append(i.Heredocs, h)
	}
	return nil
}

// shellWords splits at blanks outside of quotes, and keeps the quotes.
func shellWords(s string) []string {
	var out []string
	var quote byte
	start := -1
	for i := 0; i < len(s); i++ {
		c := s[i]
		blank := quote == 0 && (c == ' ' || c == '\t')
		switch {
		case blank && start >= 0:
			out, start = append(out, s[start:i]), -1
		case !blank && start < 0:
			start = i
		}
		switch {
		case quote == c:
			quote = 0
		case c == '\\' && quote != '\'':
			i++
		case quote == 0 && (c == '"' || c == '\''):
			quote = c
		}
	}
	if start >= 0 {
		out = append(out, s[start:])
	}
	return out
}

func quoted(s string) string {
	if len(s) > maxQuoted {
		s = s[:maxQuoted] + "..."
	}
	return fmt.Sprintf("%q", s)
}
