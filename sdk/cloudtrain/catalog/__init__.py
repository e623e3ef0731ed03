"""Instances, containers, prices and limits of AWS. In the data files, each value has a source and a date."""

from cloudtrain.catalog.images import Image, image_uri, images, registry_source
from cloudtrain.catalog.instances import Instance, classify, find_instance, instance_names, suggest
from cloudtrain.catalog.prices import (
    Price,
    Prices,
    bundled_prices,
    merge_newest,
    price_date,
    priced_regions,
    read_prices,
    usd_per_hour,
)
from cloudtrain.catalog.source import Source
from cloudtrain.catalog.transfers import s3_upload_bytes_per_second, s3_upload_source

__all__ = [
    "Image",
    "Instance",
    "Price",
    "Prices",
    "Source",
    "bundled_prices",
    "classify",
    "find_instance",
    "image_uri",
    "images",
    "instance_names",
    "merge_newest",
    "price_date",
    "priced_regions",
    "read_prices",
    "registry_source",
    "s3_upload_bytes_per_second",
    "s3_upload_source",
    "suggest",
    "usd_per_hour",
]
