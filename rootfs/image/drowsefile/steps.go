package drowsefile

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
	"github.com/drowse-vm/drowse/rootfs/image"
)

// Step is one step of a build. One of Run, Copy and Workdir is set.
type Step struct {
	Line int
	Text string // for display, one line
	Run  *Run
	Copy *Copy
	// Workdir is a directory to make if it is missing; absolute and clean.
	Workdir string
}

// Run is a command.
type Run struct {
	Argv []string
	Env  []string // the image's variables and the arguments, each key once
	User string
	Dir  string // absolute, or ""
}

// Copy says which files go where.
type Copy struct {
	Sources []string // paths or patterns in the context, with slashes; none leads out of it
	Inline  []Inline
	Dest    string // absolute and clean
	DestDir bool   // Dest is a directory even if none is there
	Unpack  bool   // archives among the sources are unpacked
	Owner   string // USER[:GROUP], or "" for root
	Mode    int64  // permissions; -1 keeps those of the files
}

// Inline is a file whose content is in the build file.
type Inline struct{ Name, Text string }

// ShellArgv returns the arguments of a command that is not a list.
func ShellArgv(script string) []string { return []string{"/bin/sh", "-c", script} }

// maxConfigVars bounds each of the variables, labels and ports of an image.
const maxConfigVars = 1024

// From returns the base image's name, with the given arguments inserted, and the line of FROM.
func (f *File) From(args map[string]string) (string, int, error) {
	b := &builder{args: args, declared: map[string]string{}}
	for n := range f.Instructions {
		i := &f.Instructions[n]
		if i.Name != "FROM" {
			if err := b.arg(i, false); err != nil {
				return "", 0, err
			}
			continue
		}
		words, err := b.words(i)
		switch {
		case err != nil:
			return "", 0, err
		case len(words) == 0 || words[0] == "":
			return "", 0, i.fail("its variables are empty, so it names no image")
		case len(words) > 1:
			return "", 0, i.fail("%s: builds of several stages, and names for them, are not supported", quoted(strings.Join(words[1:], " ")))
		}
		return words[0], i.Line, nil
	}
	return "", 0, &Error{1, "", "there is no FROM, which says what to begin with"}
}

// Build returns the steps and the image's final configuration. base is the base image's configuration. args are
// the values of ARG instructions, each of which must exist. Errors match ErrSyntax.
func (f *File) Build(base image.RunConfig, args map[string]string) ([]Step, image.RunConfig, error) {
	b := &builder{args: args, declared: map[string]string{}, global: map[string]string{}, used: map[string]bool{}}
	base.Env, base.ExposedPorts, base.Labels = slices.Clone(base.Env), slices.Clone(base.ExposedPorts), maps.Clone(base.Labels)
	b.config = base
	for n := range f.Instructions {
		i := &f.Instructions[n]
		if i.Name == "FROM" {
			b.global, b.declared, b.inStage = b.declared, map[string]string{}, true
			continue
		}
		if err := b.instruction(i); err != nil {
			return nil, image.RunConfig{}, err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(args)) {
		if !b.used[name] {
			return nil, image.RunConfig{}, &Error{1, "", fmt.Sprintf("a value is given for the argument %s, which no ARG instruction names", quoted(name))}
		}
	}
	return b.steps, b.config, nil
}

type builder struct {
	args     map[string]string // given
	global   map[string]string // declared before FROM, with their values
	declared map[string]string // in force, with their values; those without a value are left out
	used     map[string]bool
	inStage  bool
	config   image.RunConfig // it has each variable once
	cmdSet   bool
	steps    []Step
}

// get returns the value of a variable. ENV overrides ARG.
func (b *builder) get(name string) (string, bool) {
	for _, kv := range b.config.Env {
		if k, v, _ := strings.Cut(kv, "="); k == name {
			return v, true
		}
	}
	v, ok := b.declared[name]
	return v, ok
}

func (b *builder) instruction(i *Instruction) (err error) {
	switch i.Name {
	case "ARG":
		return b.arg(i, b.inStage)
	case "ENV":
		return b.pairs(i, func(k, v string) error {
			if !variableRE.MatchString(k) {
				return i.fail("%s is no name of a variable", quoted(k))
			}
			b.config.Env = setEnv(b.config.Env, k, v)
			return b.bound(i, len(b.config.Env))
		})
	case "LABEL":
		return b.pairs(i, func(k, v string) error {
			if b.config.Labels == nil {
				b.config.Labels = map[string]string{}
			}
			b.config.Labels[k] = v
			return b.bound(i, len(b.config.Labels))
		})
	case "RUN":
		return b.run(i)
	case "COPY", "ADD":
		return b.copy(i)
	case "WORKDIR":
		return b.workdir(i)
	case "USER":
		b.config.User, err = b.one(i)
	case "STOPSIGNAL":
		if b.config.StopSignal, err = b.one(i); err == nil && !signalRE.MatchString(b.config.StopSignal) {
			err = i.fail("%s is no signal: use a name such as SIGTERM, or a number", quoted(b.config.StopSignal))
		}
	case "ENTRYPOINT":
		b.config.Entrypoint = command(i)
		if !b.cmdSet {
			b.config.Cmd = nil // the base image's belongs to its entrypoint
		}
	case "CMD":
		b.config.Cmd, b.cmdSet = command(i), true
	case "EXPOSE":
		return b.expose(i)
	}
	return err
}

// bound enforces the limit of variables, labels and ports.
func (b *builder) bound(i *Instruction, n int) error {
	if n > maxConfigVars {
		return i.fail("the image would have more than %d of these", maxConfigVars)
	}
	return nil
}

var (
	variableRE = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_.-]*$`)
	argRE      = lazyregexp.New(`^[A-Za-z_][A-Za-z0-9_]*$`)
	signalRE   = lazyregexp.New(`^(SIG[A-Z0-9+-]{2,12}|[1-9][0-9]?)$`)
	portRE     = lazyregexp.New(`^([0-9]{1,5})(?:-([0-9]{1,5}))?(?:/(tcp|udp|sctp))?$`)
)

// setEnv replaces or adds a variable.
func setEnv(env []string, key, value string) []string {
	for n, kv := range env {
		if k, _, _ := strings.Cut(kv, "="); k == key {
			env[n] = key + "=" + value
			return env
		}
	}
	return append(env, key+"="+value)
}

func command(i *Instruction) []string {
	if i.List != nil {
		return slices.Clone(i.List)
	}
	return ShellArgv(i.Rest)
}

// words expands the words after an instruction's name.
func (b *builder) words(i *Instruction) ([]string, error) {
	words, err := expandWords(i.Rest, b.get)
	return words, i.wrong(err)
}

// word expands a part of them as one word.
func (b *builder) word(i *Instruction, s string) (string, error) {
	v, err := expand(s, b.get)
	return v, i.wrong(err)
}

// one expands what must be exactly one word.
func (b *builder) one(i *Instruction) (string, error) {
	words, err := b.words(i)
	if err == nil && (len(words) != 1 || words[0] == "") {
		err = i.fail("%d words, where one must be", len(words))
	}
	if err != nil {
		return "", err
	}
	return words[0], nil
}

// arg declares arguments. Within the stage, an argument without a value takes that of an ARG before FROM.
func (b *builder) arg(i *Instruction, stage bool) error {
	words, err := b.words(i)
	if err != nil {
		return err
	}
	for _, w := range words {
		name, value, has := strings.Cut(w, "=")
		if !argRE.MatchString(name) {
			return i.fail("%s is no name of an argument", quoted(name))
		}
		if b.used != nil {
			b.used[name] = true
		}
		if v, ok := b.args[name]; ok {
			value, has = v, true
		} else if v, ok := b.global[name]; ok && stage && !has {
			value, has = v, true
		}
		delete(b.declared, name)
		if has {
			b.declared[name] = value
		}
		if err := b.bound(i, len(b.declared)); err != nil {
			return err
		}
	}
	return nil
}

// pairs reads KEY=VALUE..., or KEY and the rest of the line as its value.
func (b *builder) pairs(i *Instruction, set func(k, v string) error) error {
	raw := shellWords(i.Rest)
	if !strings.Contains(raw[0], "=") {
		key, rest := cutSpace(i.Rest)
		if rest == "" {
			return i.fail("%s has no value: use KEY=VALUE", quoted(key))
		}
		key, err := b.word(i, key)
		if err != nil {
			return err
		}
		value, err := b.word(i, rest)
		if err != nil {
			return err
		}
		return set(key, value)
	}
	// All values are expanded with the variables before the instruction.
	words, err := b.words(i)
	if err != nil {
		return err
	}
	for _, w := range words {
		k, v, ok := strings.Cut(w, "=")
		if !ok || k == "" {
			return i.fail("%s is not of the form KEY=VALUE", quoted(w))
		}
		if err := set(k, v); err != nil {
			return err
		}
	}
	return nil
}

func (b *builder) add(i *Instruction, s Step) {
	s.Line = i.Line
	b.steps = append(b.steps, s)
}

// summary returns an instruction in one line.
func summary(i *Instruction) string {
	const most = 200 // bytes
	text := i.Name
	for _, f := range i.Flags {
		text += " --" + f.Name + "=" + f.Value
	}
	text = strings.Join(strings.Fields(text+" "+i.Rest), " ")
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "") + "..."
	}
	return text
}

func (b *builder) run(i *Instruction) error {
	r := &Run{Argv: i.List, User: b.config.User, Dir: b.config.Workdir}
	switch {
	case i.List != nil:
		if len(i.List) == 0 || i.List[0] == "" {
			return i.fail("the list names no program")
		}
	case len(i.Heredocs) == 1 && heredocRE.MatchString(i.Rest):
		if strings.HasPrefix(i.Heredocs[0].Text, "#!") {
			return i.fail("a script with an interpreter of its own (#!) is not supported: name it before the text, as in RUN python3 <<EOF")
		}
		r.Argv = ShellArgv(i.Heredocs[0].Text)
	default:
		script := i.Rest
		for n, h := range i.Heredocs {
			if n == 0 {
				script += "\n"
			}
			script += h.Text + h.Name + "\n"
		}
		r.Argv = ShellArgv(script)
	}
	r.Env = slices.Clone(b.config.Env)
	for _, name := range slices.Sorted(maps.Keys(b.declared)) {
		if !slices.ContainsFunc(r.Env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") }) {
			r.Env = append(r.Env, name+"="+b.declared[name])
		}
	}
	b.add(i, Step{Text: summary(i), Run: r})
	return nil
}

// inWorkdir makes a path of the image absolute and clean. ".." stops at the image's root.
func (b *builder) inWorkdir(p string) string {
	if !path.IsAbs(p) {
		p = path.Join("/", b.config.Workdir, p)
	}
	return path.Clean(p)
}

func (b *builder) workdir(i *Instruction) error {
	dir, err := b.word(i, i.Rest)
	if err != nil {
		return err
	}
	if dir == "" {
		return i.fail("its variables are empty, so it names no directory")
	}
	b.config.Workdir = b.inWorkdir(dir)
	b.add(i, Step{Text: "WORKDIR " + b.config.Workdir, Workdir: b.config.Workdir})
	return nil
}

func (b *builder) copy(i *Instruction) error {
	c := &Copy{Unpack: i.Name == "ADD", Mode: -1}
	for _, f := range i.Flags {
		v, err := expand(f.Value, b.get)
		if err != nil {
			return i.fail("--%s: %v", f.Name, err)
		}
		if f.Name == "chown" {
			c.Owner = v
			continue
		}
		mode, err := strconv.ParseInt(v, 8, 32)
		if err != nil || mode < 0 || mode > 0o7777 {
			return i.fail("--chmod=%s: use an octal number such as 755", quoted(v))
		}
		c.Mode = mode
	}
	words := i.List
	if words == nil {
		words = shellWords(i.Rest)
	}
	if len(words) < 2 {
		return i.fail("it needs a source and a destination")
	}
	inline := i.Heredocs
	for n, w := range words {
		if n < len(words)-1 && i.List == nil && heredocRE.MatchString(w) && len(inline) > 0 {
			h := inline[0]
			inline = inline[1:]
			if h.Expand {
				text, err := expandText(h.Text, b.get)
				if err != nil {
					return i.fail("the text %s: %v", h.Name, err)
				}
				h.Text = text
			}
			c.Inline = append(c.Inline, Inline{h.Name, h.Text})
			continue
		}
		v, err := expand(w, b.get)
		if i.List != nil {
			v, err = expandText(w, b.get)
		}
		switch {
		case err != nil:
			return i.fail("%v", err)
		case v == "":
			return i.fail("%s is empty", quoted(w))
		case n == len(words)-1:
			c.DestDir = strings.HasSuffix(v, "/") || v == "." || strings.HasSuffix(v, "/.")
			c.Dest = b.inWorkdir(v)
			continue
		}
		if err := c.source(i, v); err != nil {
			return err
		}
	}
	if len(inline) > 0 {
		return i.fail("the destination cannot be a text")
	}
	if len(c.Sources)+len(c.Inline) > 1 && !c.DestDir {
		return i.fail("it has several sources, so its destination must end with a slash")
	}
	b.add(i, Step{Text: summary(i), Copy: c})
	return nil
}

func (c *Copy) source(i *Instruction, v string) error {
	if c.Unpack && (strings.Contains(v, "://") || strings.HasPrefix(v, "git@")) {
		return i.fail("%s: only files of the context are supported", quoted(v))
	}
	clean := path.Clean(strings.TrimLeft(v, "/"))
	if clean == ".." || strings.HasPrefix(clean, "../") {
		return i.fail("%s leads out of the context", quoted(v))
	}
	c.Sources = append(c.Sources, clean)
	return nil
}

func (b *builder) expose(i *Instruction) error {
	words, err := b.words(i)
	if err != nil {
		return err
	}
	for _, w := range words {
		m := portRE.FindStringSubmatch(strings.ToLower(w))
		if m == nil {
			return i.fail("%s is no port: use a number with /tcp, /udp or /sctp if need be", quoted(w))
		}
		from, _ := strconv.Atoi(m[1]) // of at most five digits
		to, _ := strconv.Atoi(cmp.Or(m[2], m[1]))
		if from < 1 || to < from || to > 65535 {
			return i.fail("%s is not between 1 and 65535", quoted(w))
		}
		if err := b.bound(i, to-from+1+len(b.config.ExposedPorts)); err != nil {
			return err
		}
		for p := from; p <= to; p++ {
			b.config.ExposedPorts = append(b.config.ExposedPorts, fmt.Sprintf("%d/%s", p, cmp.Or(m[3], "tcp")))
		}
	}
	slices.Sort(b.config.ExposedPorts)
	b.config.ExposedPorts = slices.Compact(b.config.ExposedPorts)
	return nil
}
