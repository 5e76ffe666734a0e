package drowsefile

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"github.com/drowse-vm/drowse/rootfs/image"
)

func build(text string, base image.RunConfig, args map[string]string) ([]Step, image.RunConfig, error) {
	f, err := Parse(text)
	if err != nil {
		return nil, image.RunConfig{}, err
	}
	return f.Build(base, args)
}

func TestWhat_is_not_supported_is_an_error_with_line_and_instruction(t *testing.T) {
	for name, c := range map[string]struct {
		text, want string
		args       map[string]string
	}{
		"empty file":                     {text: "# only a comment\n", want: "no FROM"},
		"instruction before FROM":        {text: "RUN x\nFROM a", want: "line 1: RUN: it stands before FROM"},
		"second stage":                   {text: "FROM a\nFROM b", want: "line 2: FROM: a second FROM"},
		"unknown instruction":            {text: "FROM a\n\nVOLUME /x", want: "line 3: VOLUME: this instruction is not supported"},
		"health check":                   {text: "FROM a\nHEALTHCHECK CMD x", want: "line 2: HEALTHCHECK"},
		"no instruction":                 {text: "FROM a\n=x", want: `line 2: "=x" is no instruction`},
		"instruction with nothing":       {text: "FROM a\nRUN", want: "line 2: RUN: nothing follows it"},
		"mount of RUN":                   {text: "FROM a\nRUN --mount=type=cache x", want: "line 2: RUN: the flag --mount is not supported"},
		"network of RUN":                 {text: "FROM a\nRUN --network=none x", want: "the flag --network is not supported"},
		"platform of FROM":               {text: "FROM --platform=linux/arm64 a", want: "line 1: FROM: the flag --platform is not supported"},
		"copy from a stage":              {text: "FROM a\nCOPY --from=b x y", want: "line 2: COPY: the flag --from is not supported"},
		"flag without a value":           {text: "FROM a\nCOPY --chown x y", want: "--chown has no value"},
		"flag twice":                     {text: "FROM a\nCOPY --chown=1 --chown=2 x y", want: "--chown is given twice"},
		"other escape character":         {text: "# escape=`\nFROM a", want: "another escape character"},
		"mode that is no number":         {text: "FROM a\nCOPY --chmod=u+x x y", want: "use an octal number"},
		"add of a URL":                   {text: "FROM a\nADD https://x/y /z", want: "line 2: ADD: \"https://x/y\": only files of the context"},
		"source outside the context":     {text: "FROM a\nCOPY ../x /y", want: "leads out of the context"},
		"source that climbs out":         {text: "FROM a\nCOPY a/../../x /y", want: "leads out of the context"},
		"copy without a destination":     {text: "FROM a\nCOPY x", want: "a source and a destination"},
		"several sources, no directory":  {text: "FROM a\nCOPY x y z", want: "must end with a slash"},
		"text without an end":            {text: "FROM a\nRUN <<E\nx", want: `line 2: RUN: the text that ends at a line "E" has no such line`},
		"script with an interpreter":     {text: "FROM a\nRUN <<E\n#!/usr/bin/python3\nE\n", want: "interpreter of its own"},
		"port out of range":              {text: "FROM a\nEXPOSE 70000", want: "not between 1 and 65535"},
		"port range backwards":           {text: "FROM a\nEXPOSE 20-10", want: "not between"},
		"signal that is none":            {text: "FROM a\nSTOPSIGNAL stop", want: "line 2: STOPSIGNAL: \"stop\" is no signal"},
		"variable name":                  {text: "FROM a\nENV 1=2", want: `"1" is no name of a variable`},
		"ENV without a value":            {text: "FROM a\nENV x", want: "has no value"},
		"quote without an end":           {text: "FROM a\nENV x='y", want: "a ' has no end"},
		"brace without an end":           {text: "FROM a\nENV x=${y:-z", want: "a ${ has no end"},
		"other parameter expansion":      {text: "FROM a\nENV x=${y%z}", want: "is followed by what is not supported"},
		"argument that nobody declares":  {text: "FROM a", args: map[string]string{"X": "1"}, want: `the argument "X"`},
		"empty list of a program":        {text: "FROM a\nRUN []", want: "names no program"},
		"zero byte":                      {text: "FROM a\x00", want: "zero byte"},
		"no UTF-8":                       {text: "FROM \xff", want: "UTF-8"},
		"too many instructions":          {text: "FROM a\n" + strings.Repeat("RUN x\n", maxInstructions), want: "more than 1024 instructions"},
		"too large":                      {text: "FROM a\n" + strings.Repeat("#", MaxFile), want: "more than 1048576 bytes"},
		"variables that grow and grow":   {text: "FROM a\nENV a=" + strings.Repeat("x", 1000) + "\n" + strings.Repeat("ENV a=$a$a$a$a\n", 12), want: "more than 1048576 bytes"},
		"user of an empty variable":      {text: "FROM a\nUSER $nobody", want: "one must be"},
		"directory of an empty variable": {text: "FROM a\nWORKDIR $nobody", want: "names no directory"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := build(c.text, image.RunConfig{}, c.args)
			if !errors.Is(err, ErrSyntax) || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, it should match ErrSyntax and say %q", err, c.want)
			}
		})
	}
}

func TestFrom_takes_arguments_declared_before_it(t *testing.T) {
	for name, c := range map[string]struct {
		text, want, fail string
		args             map[string]string
	}{
		"as it stands":    {text: "FROM docker://debian:bookworm", want: "docker://debian:bookworm"},
		"default":         {text: "ARG V=12\nFROM deb:$V", want: "deb:12"},
		"given":           {text: "ARG V=12\nFROM deb:${V}", args: map[string]string{"V": "13"}, want: "deb:13"},
		"named stage":     {text: "FROM a AS b", fail: "several stages"},
		"empty variables": {text: "FROM $x", fail: "names no image"},
	} {
		t.Run(name, func(t *testing.T) {
			f, err := Parse(c.text)
			if err != nil {
				t.Fatal(err)
			}
			got, _, err := f.From(c.args)
			if c.fail != "" {
				if err == nil || !strings.Contains(err.Error(), c.fail) {
					t.Errorf("error %v, it should say %q", err, c.fail)
				}
				return
			}
			if err != nil || got != c.want {
				t.Errorf("FROM %q, %v; want %q", got, err, c.want)
			}
		})
	}
}

func TestSteps_say_all_that_is_done(t *testing.T) {
	base := image.RunConfig{Env: []string{"PATH=/bin"}, User: "app", Workdir: "/srv", Cmd: []string{"old"}, Entrypoint: []string{"e"}}
	sh := ShellArgv
	for name, c := range map[string]struct {
		text string
		args map[string]string
		want []Step
	}{
		"a command of the shell": {
			text: "FROM a\nRUN echo $x && [ -f y ]",
			want: []Step{{Line: 2, Text: "RUN echo $x && [ -f y ]", Run: &Run{Argv: sh("echo $x && [ -f y ]"), Env: base.Env, User: "app", Dir: "/srv"}}},
		},
		"a test of the shell that looks like a list": {
			text: "FROM a\nRUN [ -f y ]",
			want: []Step{{Line: 2, Text: "RUN [ -f y ]", Run: &Run{Argv: sh("[ -f y ]"), Env: base.Env, User: "app", Dir: "/srv"}}},
		},
		"a list": {
			text: "FROM a\nRUN [\"/bin/x\", \"$y\"]",
			want: []Step{{Line: 2, Text: `RUN ["/bin/x", "$y"]`, Run: &Run{Argv: []string{"/bin/x", "$y"}, Env: base.Env, User: "app", Dir: "/srv"}}},
		},
		"continued with a comment between": {
			text: "FROM a\nRUN x \\\n# not this\n\n  y\n",
			want: []Step{{Line: 2, Text: "RUN x y", Run: &Run{Argv: sh("x   y"), Env: base.Env, User: "app", Dir: "/srv"}}},
		},
		"a script": {
			text: "FROM a\nRUN <<E\na $x\n# kept\nE\n",
			want: []Step{{Line: 2, Text: "RUN <<E", Run: &Run{Argv: sh("a $x\n# kept\n"), Env: base.Env, User: "app", Dir: "/srv"}}},
		},
		"a command with a text": {
			text: "FROM a\nRUN cat <<'E' > /x\n$x\nE\n",
			want: []Step{{Line: 2, Text: "RUN cat <<'E' > /x", Run: &Run{Argv: sh("cat <<'E' > /x\n$x\nE\n"), Env: base.Env, User: "app", Dir: "/srv"}}},
		},
		"variables, user and directory change what follows": {
			text: "FROM a\nENV PATH=/x:$PATH q='a b' PATH2=$q\nUSER root\nWORKDIR sub\nRUN y",
			want: []Step{
				{Line: 4, Text: "WORKDIR /srv/sub", Workdir: "/srv/sub"},
				{Line: 5, Text: "RUN y", Run: &Run{Argv: sh("y"), Env: []string{"PATH=/x:/bin", "q=a b", "PATH2="}, User: "root", Dir: "/srv/sub"}},
			},
		},
		"arguments are variables of commands, under those of the image": {
			text: "ARG G=glob\nFROM a\nARG G\nARG v=1 w PATH=no\nRUN y",
			args: map[string]string{"w": "2"},
			want: []Step{{Line: 5, Text: "RUN y", Run: &Run{Argv: sh("y"), Env: []string{"PATH=/bin", "G=glob", "v=1", "w=2"}, User: "app", Dir: "/srv"}}},
		},
		"copies": {
			text: "FROM a\nENV d=/dst\nCOPY --chown=u:g --chmod=0640 a b/* $d/\nADD [\"x y\", \"/z\"]\nCOPY x .",
			want: []Step{
				{Line: 3, Text: "COPY --chown=u:g --chmod=0640 a b/* $d/", Copy: &Copy{Sources: []string{"a", "b/*"}, Dest: "/dst", DestDir: true, Owner: "u:g", Mode: 0o640}},
				{Line: 4, Text: `ADD ["x y", "/z"]`, Copy: &Copy{Sources: []string{"x y"}, Dest: "/z", Unpack: true, Mode: -1}},
				{Line: 5, Text: "COPY x .", Copy: &Copy{Sources: []string{"x"}, Dest: "/srv", DestDir: true, Mode: -1}},
			},
		},
		"a text as a file": {
			text: "FROM a\nENV v=1\nCOPY <<E <<-'F' /d/\n$v\\$v\nE\n\t$v\n\tF\n",
			want: []Step{{Line: 3, Text: "COPY <<E <<-'F' /d/", Copy: &Copy{Inline: []Inline{{"E", "1$v\n"}, {"F", "$v\n"}}, Dest: "/d", DestDir: true, Mode: -1}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := build(c.text, base, c.args)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("steps\n%+v, want\n%+v", dump(got), dump(c.want))
			}
		})
	}
}

func dump(steps []Step) (out []any) {
	for _, s := range steps {
		out = append(out, s.Line, s.Text, s.Workdir)
		if s.Run != nil {
			out = append(out, *s.Run)
		}
		if s.Copy != nil {
			out = append(out, *s.Copy)
		}
	}
	return out
}

func TestThe_configuration_is_that_of_base_and_instructions(t *testing.T) {
	base := image.RunConfig{Env: []string{"A=1"}, Cmd: []string{"old"}, Labels: map[string]string{"x": "y"}, ExposedPorts: []string{"1/tcp"}}
	_, got, err := build(`FROM a
ENV B ${A:+set} ${none:-default}
LABEL x="1 2" z=$A
EXPOSE 80 53/udp 8000-8001
STOPSIGNAL SIGINT
ENTRYPOINT ["/e"]
USER u:g
`, base, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := image.RunConfig{
		Entrypoint: []string{"/e"}, Env: []string{"A=1", "B=set default"}, User: "u:g", StopSignal: "SIGINT",
		Labels: map[string]string{"x": "1 2", "z": "1"}, ExposedPorts: []string{"1/tcp", "53/udp", "80/tcp", "8000/tcp", "8001/tcp"},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("configuration %+v, want %+v", got, want)
	}
	if base.Labels["x"] != "y" || len(base.Env) != 1 {
		t.Errorf("the base's own configuration has changed: %+v", base)
	}
	if _, got, _ := build("FROM a\nCMD x\nENTRYPOINT y", base, nil); !reflect.DeepEqual(got.Cmd, ShellArgv("x")) {
		t.Errorf("CMD before ENTRYPOINT is %q", got.Cmd)
	}
}

func TestIgnorePatterns(t *testing.T) {
	for name, c := range map[string]struct {
		text         string
		ignored, not []string
	}{
		"a name":             {"x\n# c\n\n", []string{"x", "x/y"}, []string{"y/x", "xx"}},
		"anywhere":           {"**/x", []string{"x", "a/x", "a/b/x/c"}, []string{"a/xx"}},
		"star":               {"*.log", []string{"a.log"}, []string{"d/a.log"}},
		"exception":          {"*\n!keep\nkeep/not", []string{"a", "keep/not"}, []string{"keep", "keep/x"}},
		"class":              {"[a-c]?", []string{"ax"}, []string{"dx", "a"}},
		"not of a class":     {"[!a]x", []string{"bx"}, []string{"ax", "/x"}},
		"slashes around":     {"/d/", []string{"d/x"}, []string{"e/d"}},
		"dots are no wonder": {"a.b", []string{"a.b"}, []string{"axb"}},
		"below everything":   {"d/**", []string{"d/x", "d/x/y"}, []string{"d"}},
		"the context itself": {".", nil, []string{"x"}},
	} {
		t.Run(name, func(t *testing.T) {
			ig, err := ParseIgnore(c.text)
			if err != nil {
				t.Fatal(err)
			}
			for _, p := range c.ignored {
				if !ig.Match(p) {
					t.Errorf("%s is not ignored", p)
				}
			}
			for _, p := range c.not {
				if ig.Match(p) {
					t.Errorf("%s is ignored", p)
				}
			}
		})
	}
	for _, bad := range []string{"[", "[]", `x\`} {
		if _, err := ParseIgnore(bad); !errors.Is(err, ErrSyntax) {
			t.Errorf("pattern %q: error %v", bad, err)
		}
	}
}

// What is read is read again from its own text in the same way, and nothing panics.
func FuzzParse(f *testing.F) {
	f.Add("ARG A=1\nFROM $A\nRUN x \\\n y\nCOPY --chown=1 <<E a/ b/\n$A\nE\n")
	f.Add("FROM a\nENV a=${b:-${c:+d}} e='f' \"g\"=h\nLABEL x y\nRUN [\"a\"]\nRUN <<-'E'\n\tE\n")
	f.Add("FROM a\nEXPOSE 1-3/udp\nWORKDIR ../..\nSTOPSIGNAL 9\nUSER ${a\n")
	f.Fuzz(func(t *testing.T, text string) {
		file, err := Parse(text)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) || e.Line < 1 {
				t.Fatalf("error %v", err)
			}
			return
		}
		_, _, _ = file.From(nil)
		steps, _, err := file.Build(image.RunConfig{Env: []string{"A=1"}, Workdir: "/w"}, nil)
		if err != nil {
			if !errors.Is(err, ErrSyntax) {
				t.Fatalf("error %v", err)
			}
			return
		}
		for _, s := range steps {
			if c := s.Copy; c != nil {
				if !strings.HasPrefix(c.Dest, "/") || strings.Contains("/"+c.Dest+"/", "/../") {
					t.Fatalf("destination %q", c.Dest)
				}
				for _, src := range c.Sources {
					if strings.HasPrefix(src, "/") || strings.Contains("/"+src+"/", "/../") {
						t.Fatalf("source %q", src)
					}
				}
			}
		}
	})
}

func FuzzIgnore(f *testing.F) {
	f.Add("*\n!a/**/[b-c]?\n", "a/x/by")
	f.Fuzz(func(t *testing.T, text, p string) {
		if ig, err := ParseIgnore(text); err == nil {
			ig.Match(p)
		} else if !errors.Is(err, ErrSyntax) {
			t.Fatal(err)
		}
	})
}
