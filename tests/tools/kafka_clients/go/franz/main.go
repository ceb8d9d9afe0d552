// franz-go makes a topic, produces with each codec, consumes in a group of two members, and
// administers: franz ADDRESS. It ends with status 1 at the first thing that is not as it should be.
package main

import (
	"context"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kgo"
)

const (
	topic      = "franz"
	group      = "franz-group"
	partitions = 4
	each       = 500
)

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func check(is bool, format string, values ...any) {
	if !is {
		must(fmt.Errorf(format, values...))
	}
}

func produce(ctx context.Context, seed string) int {
	codecs := map[string]kgo.CompressionCodec{
		"none": kgo.NoCompression(), "gzip": kgo.GzipCompression(),
		"snappy": kgo.SnappyCompression(), "lz4": kgo.Lz4Compression(),
		"zstd": kgo.ZstdCompression(),
	}
	for name, codec := range codecs {
		client, err := kgo.NewClient(kgo.SeedBrokers(seed), kgo.ProducerBatchCompression(codec))
		must(err)
		var records []*kgo.Record
		for n := range each {
			records = append(records, &kgo.Record{
				Topic: topic, Key: fmt.Appendf(nil, "key-%d", n),
				Value:   fmt.Appendf(nil, "%s %d", name, n),
				Headers: []kgo.RecordHeader{{Key: "codec", Value: []byte(name)}},
			})
		}
		must(client.ProduceSync(ctx, records...).FirstErr())
		client.Close()
	}
	return len(codecs) * each
}

// consume reads all records in a group of two members, and returns how many times each was read.
func consume(ctx context.Context, seed string, total int, balancer kgo.GroupBalancer) {
	name := group + "-" + balancer.ProtocolName()
	var lock sync.Mutex
	seen := map[string]bool{}
	ctx, done := context.WithCancel(ctx)
	defer done()
	var members sync.WaitGroup
	for range 2 {
		members.Add(1)
		go func() {
			defer members.Done()
			client, err := kgo.NewClient(kgo.SeedBrokers(seed), kgo.ConsumerGroup(name),
				kgo.ConsumeTopics(topic), kgo.Balancers(balancer),
				kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))
			must(err)
			for ctx.Err() == nil {
				fetches := client.PollFetches(ctx)
				if ctx.Err() != nil {
					break
				}
				must(fetches.Err0())
				lock.Lock()
				fetches.EachRecord(func(record *kgo.Record) {
					check(len(record.Headers) == 1, "no header")
					seen[string(record.Value)] = true
				})
				if len(seen) == total {
					done()
				}
				lock.Unlock()
			}
			must(client.CommitUncommittedOffsets(context.Background()))
			client.Close()
		}()
	}
	members.Wait()
	check(len(seen) == total, "%s: %d of %d records read", name, len(seen), total)
}

func administer(ctx context.Context, admin *kadm.Client, total int) {
	ends, err := admin.ListEndOffsets(ctx, topic)
	must(err)
	var sum int64
	ends.Each(func(offset kadm.ListedOffset) { sum += offset.Offset })
	check(sum == int64(total), "%d records, not %d", sum, total)
	groups, err := admin.ListGroups(ctx)
	must(err)
	check(len(groups) == 2, "groups: %v", groups)
	lags, err := admin.Lag(ctx, groups.Groups()...)
	must(err)
	lags.Each(func(lag kadm.DescribedGroupLag) { must(lag.Error()) })
	for _, one := range groups.Groups() {
		deleted, err := admin.DeleteGroup(ctx, one)
		must(err)
		must(deleted.Err)
	}
	value := "3600000"
	altered, err := admin.AlterTopicConfigs(ctx,
		[]kadm.AlterConfig{{Op: kadm.SetConfig, Name: "retention.ms", Value: &value}}, topic)
	must(err)
	must(altered[0].Err)
	configs, err := admin.DescribeTopicConfigs(ctx, topic)
	must(err)
	found := ""
	for _, config := range configs[0].Configs {
		if config.Key == "retention.ms" {
			found = config.MaybeValue()
		}
	}
	check(found == value, "retention.ms=%s", found)
	grown, err := admin.CreatePartitions(ctx, 2, topic)
	must(err)
	must(grown.Error())
	details, err := admin.ListTopics(ctx, topic)
	must(err)
	check(len(details[topic].Partitions) == partitions+2, "%v", details)
	gone, err := admin.DeleteTopic(ctx, topic)
	must(err)
	must(gone.Err)
	_, err = admin.DeleteTopic(ctx, topic)
	check(err == kerr.UnknownTopicOrPartition, "%v", err)
}

func main() {
	seed := os.Args[1]
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	client, err := kgo.NewClient(kgo.SeedBrokers(seed))
	must(err)
	defer client.Close()
	admin := kadm.NewClient(client)
	_, err = admin.CreateTopic(ctx, partitions, 1, nil, topic)
	must(err)
	total := produce(ctx, seed)
	consume(ctx, seed, total, kgo.RangeBalancer())
	consume(ctx, seed, total, kgo.CooperativeStickyBalancer())
	administer(ctx, admin, total)
	fmt.Println("franz-go passed")
}
