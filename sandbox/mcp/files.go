package mcp

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/drowse-vm/drowse/guest"
)

// Limits of files. Sizes are in bytes.
const (
	maxPath     = 4096
	defaultRead = 64 << 10
	maxRead     = 256 << 10
	maxWrite    = 1 << 20
	maxEntries  = 1000
	maxLink     = 256 // of a link's target in a list
)

// Encodings of content.
const (
	asText   = "utf-8"
	asBase64 = "base64"
)

type file struct {
	one
	Path string `json:"path" jsonschema:"absolute path in the sandbox"`
}

type readIn struct {
	file
	Offset int64 `json:"offset,omitempty" jsonschema:"byte to begin at; absent is 0"`
	Bytes  int   `json:"max_bytes,omitempty" jsonschema:"most bytes to read; absent is 65536"`
}

type readOut struct {
	Content  string `json:"content"`
	Encoding string `json:"encoding" jsonschema:"utf-8, or base64 if the bytes are not UTF-8 text"`
	Offset   int64  `json:"offset"`
	Bytes    int    `json:"bytes" jsonschema:"bytes read, before any base64"`
	Next     int64  `json:"next_offset,omitempty" jsonschema:"there may be more: read on from here"`
}

type writeIn struct {
	file
	Content    string `json:"content" jsonschema:"the whole content, which replaces what is there"`
	Encoding   string `json:"encoding,omitempty" jsonschema:"of content: utf-8 (also if absent) or base64"`
	Append     bool   `json:"append,omitempty" jsonschema:"write at the end instead"`
	Executable bool   `json:"executable,omitempty" jsonschema:"mode 0755; absent keeps the mode, or 0644"`
}

type writeOut struct {
	Path  string `json:"path"`
	Bytes int    `json:"bytes" jsonschema:"bytes written"`
}

type entry struct {
	Name     string    `json:"name"`
	Kind     string    `json:"kind" jsonschema:"file, directory, link or other"`
	Size     int64     `json:"size" jsonschema:"bytes"`
	Mode     string    `json:"mode" jsonschema:"octal permissions"`
	Modified time.Time `json:"modified"`
	Link     string    `json:"link,omitempty" jsonschema:"target of a link"`
}

type listDirOut struct {
	Entries   []entry `json:"entries"`
	Total     int     `json:"total"`
	Truncated bool    `json:"truncated" jsonschema:"only the first entries by name are here"`
}

type removeIn struct {
	file
	Recursive bool `json:"recursive,omitempty" jsonschema:"remove a directory with all that is in it, and do not fail if nothing is there"`
}

type removeOut struct {
	Removed string `json:"removed"`
}

func entryOf(i guest.FileInfo) entry {
	kind := "other"
	switch {
	case i.Mode.IsRegular():
		kind = "file"
	case i.Mode.IsDir():
		kind = "directory"
	case i.Mode&fs.ModeSymlink != 0:
		kind = "link"
	}
	// The guest chooses names and times.
	if y := i.ModTime.Year(); y < 0 || y > 9999 {
		i.ModTime = time.Time{}
	}
	if len(i.Link) > maxLink {
		i.Link = i.Link[:maxLink] + "..."
	}
	return entry{strings.ToValidUTF8(i.Name, "\uFFFD"), kind, i.Size, fmt.Sprintf("%04o", i.Mode.Perm()), i.ModTime, strings.ToValidUTF8(i.Link, "\uFFFD")}
}

func pathSchema(in *jsonschema.Schema) {
	named(in)
	p := property(in, "path")
	p.Pattern, p.MaxLength = "^/", new(maxPath)
}

func checkPath(p string) error {
	if !path.IsAbs(p) || len(p) > maxPath || strings.ContainsRune(p, 0) {
		return fmt.Errorf("path %.128q: use an absolute one of at most %d bytes, as /root/main.py", p, maxPath)
	}
	return nil
}

// at returns the files of a sandbox for a tool with a path.
func (s *Server) at(in file) (guest.Files, error) {
	b, err := s.sandbox(in.Sandbox)
	if err == nil {
		err = checkPath(in.Path)
	}
	if err != nil {
		return guest.Files{}, err
	}
	return b.Files(), nil
}

// fileError says what to do about a file.
func fileError(err error, name string) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: list_dir of %.256s shows what is there", err, path.Dir(name))
	case errors.Is(err, guest.ErrLimit):
		return fmt.Errorf("%w: use exec", err)
	}
	return err
}

func (s *Server) addFiles() {
	wakes := " Wakes a sandbox that sleeps."
	add(s, tool{
		name: "read_file", title: "Read a file", readOnly: true, idempotent: true, limit: useTime,
		says: fmt.Sprintf("Read a file of a sandbox: text as it is, anything else as base64. At most %d KiB at a time; next_offset says where to read on.", maxRead>>10) + wakes,
		edit: func(in *jsonschema.Schema) {
			pathSchema(in)
			between(in, "max_bytes", 1, maxRead)
			property(in, "offset").Minimum = new(0.0)
		},
	}, s.read)
	add(s, tool{
		name: "write_file", title: "Write a file", destructive: true, limit: useTime,
		says: fmt.Sprintf("Write a file of a sandbox as root, and make missing directories above it. At most %d KiB of content; append adds more. Readers see the old file or the whole new one.", maxWrite>>10) + wakes,
		edit: func(in *jsonschema.Schema) {
			pathSchema(in)
			oneOf(in, "encoding", []string{asText, asBase64})
			property(in, "content").MaxLength = new(base64.StdEncoding.EncodedLen(maxWrite))
		},
	}, s.write)
	add(s, tool{
		name: "list_dir", title: "List a directory", readOnly: true, idempotent: true, limit: useTime, edit: pathSchema,
		says: fmt.Sprintf("List a directory of a sandbox by name: at most %d entries.", maxEntries) + wakes,
	}, func(ctx context.Context, _ *call, in file) (out listDirOut, err error) {
		files, err := s.at(in)
		if err != nil {
			return out, err
		}
		list, err := files.ReadDir(ctx, in.Path)
		out = listDirOut{Entries: []entry{}, Total: len(list), Truncated: len(list) > maxEntries}
		for _, i := range list[:min(len(list), maxEntries)] {
			out.Entries = append(out.Entries, entryOf(i))
		}
		return out, fileError(err, in.Path)
	})
	add(s, tool{
		name: "stat_file", title: "Describe a file", readOnly: true, idempotent: true, limit: useTime, edit: pathSchema,
		says: "Describe a file or directory of a sandbox: kind, size, mode, time. Follows links." + wakes,
	}, func(ctx context.Context, _ *call, in file) (entry, error) {
		files, err := s.at(in)
		if err != nil {
			return entry{}, err
		}
		i, err := files.Stat(ctx, in.Path)
		return entryOf(i), fileError(err, in.Path)
	})
	add(s, tool{
		name: "remove_file", title: "Remove a file", destructive: true, idempotent: true, limit: useTime, edit: pathSchema,
		says: "Remove a file or an empty directory of a sandbox, or with recursive a whole tree." + wakes,
	}, func(ctx context.Context, _ *call, in removeIn) (out removeOut, err error) {
		files, err := s.at(in.file)
		if err != nil {
			return out, err
		}
		return removeOut{in.Path}, fileError(files.Remove(ctx, in.Path, in.Recursive), in.Path)
	})
}

func (s *Server) read(ctx context.Context, _ *call, in readIn) (out readOut, err error) {
	b, err := s.sandbox(in.Sandbox)
	if err == nil {
		err = checkPath(in.Path)
	}
	if err != nil {
		return out, err
	}
	most := cmp.Or(in.Bytes, defaultRead)
	if in.Offset < 0 || most < 1 || most > maxRead {
		return out, fmt.Errorf("offset %d and max_bytes %d: use an offset of 0 or more, and 1 to %d bytes", in.Offset, most, maxRead)
	}
	c, err := b.Connect(ctx)
	if err != nil {
		return out, err
	}
	defer c.Close()
	var data bytes.Buffer
	if _, err := c.ReadFile(ctx, in.Path, &data, in.Offset, int64(most)); err != nil {
		return out, fileError(err, in.Path)
	}
	full := data.Len() == most
	p := data.Bytes()
	out = readOut{Encoding: asText, Offset: in.Offset}
	if full && most > utf8.UTFMax { // a character that the end cuts belongs to the next part
		p = p[:len(p)-cutRune(p)]
	}
	if utf8.Valid(p) && !bytes.ContainsRune(p, 0) {
		out.Content = string(p)
	} else {
		p = data.Bytes()
		out.Content, out.Encoding = base64.StdEncoding.EncodeToString(p), asBase64
	}
	out.Bytes = len(p)
	if full {
		out.Next = in.Offset + int64(len(p))
	}
	return out, nil
}

// cutRune returns how many bytes at the end of p are the beginning of a longer character.
func cutRune(p []byte) int {
	for n := 1; n < utf8.UTFMax && n <= len(p); n++ {
		if tail := p[len(p)-n:]; utf8.RuneStart(tail[0]) {
			if !utf8.FullRune(tail) {
				return n
			}
			return 0
		}
	}
	return 0
}

func (s *Server) write(ctx context.Context, _ *call, in writeIn) (out writeOut, err error) {
	files, err := s.at(in.file)
	if err != nil {
		return out, err
	}
	data := []byte(in.Content)
	switch in.Encoding {
	case "", asText:
	case asBase64:
		if data, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return out, fmt.Errorf("content is not base64: %w: use the standard alphabet with padding, or encoding utf-8", err)
		}
	default:
		return out, fmt.Errorf("encoding %.64q: use utf-8 or base64", in.Encoding)
	}
	if len(data) > maxWrite {
		return out, fmt.Errorf("content of %d bytes: use at most %d, and append for more", len(data), maxWrite)
	}
	o := guest.WriteOptions{Parents: true, Append: in.Append, Atomic: !in.Append}
	if in.Executable {
		o.Perm = 0o755
	}
	if err := files.WriteFile(ctx, in.Path, bytes.NewReader(data), o); err != nil {
		return out, fileError(err, in.Path)
	}
	return writeOut{in.Path, len(data)}, nil
}
