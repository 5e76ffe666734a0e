package kernel

import (
	"context"
	"maps"
	"strings"

	"github.com/drowse-vm/drowse/internal/lazyregexp"
)

// cached returns the newest kernel of this recipe with these patches and options, from this cache or else the
// shared one, or nil. Its compiler and the version of Debian's source do not matter, but a tarball that the caller
// names does.
func (b *builder) cached(ctx context.Context) (*Kernel, error) {
	named := ""
	if b.opts.SourceTarball != "" {
		src, err := b.source(ctx)
		if err != nil {
			return nil, err
		}
		named = src.identity
	}
	want := b.recipe()
	fits := func(k *Kernel) bool {
		if k.Kind != Built || named != "" && k.Inputs["source"] != named ||
			named == "" && !strings.HasPrefix(k.Inputs["source"], sourcePackage+" ") {
			return false
		}
		in := maps.Clone(k.Inputs)
		for _, other := range []string{"source", "gcc", "ld"} {
			delete(in, other)
		}
		return maps.Equal(in, want)
	}
	k, err := findNewest(b.opts.CacheDir, fits)
	if err != nil {
		return nil, err
	}
	if k != nil {
		b.offer(ctx, k)
		return k, nil
	}
	if b.opts.SharedDir == "" {
		return nil, nil
	}
	shared, err := findNewest(b.opts.SharedDir, fits)
	if shared == nil || err != nil {
		return nil, ctx.Err() // an unreadable shared folder counts as empty
	}
	return once(ctx, b.opts.CacheDir, Built, shared.InputsHash, func() (*Kernel, error) { return b.takeShared(ctx, shared.InputsHash) })
}

// cloudKernel matches the name of a package that cloudPackage depends on.
var cloudKernel = lazyregexp.New(`^linux-image-[0-9][^ ]*-cloud-amd64 `)

// cachedCloud returns the newest of Debian's cloud kernels in the cache that loads these modules, or nil.
func cachedCloud(cacheDir, modules string) (*Kernel, error) {
	return findNewest(cacheDir, func(k *Kernel) bool {
		return k.Kind == Debian && k.Inputs["recipe"] == recipeVersion && k.Inputs["modules"] == modules &&
			cloudKernel.MatchString(k.Inputs["package"])
	})
}

// tellNewer calls tell, if set, with the version in apt's index, if it is newer than the version in the identity
// of a package ("name version ..."). It does not update the index. If it cannot read the index, it does not call
// tell.
func (a *apt) tellNewer(ctx context.Context, identity string, lookup func(context.Context) (aptPackage, error), tell func(version string)) {
	f := strings.Fields(identity)
	if tell == nil || len(f) < 2 || !packageVersion.MatchString(f[1]) {
		return
	}
	p, err := lookup(ctx)
	if err != nil {
		return
	}
	if _, err := a.command("comparing versions").run(ctx, "dpkg", "--compare-versions", f[1], "lt", p.version); err == nil {
		tell(p.version)
	}
}
