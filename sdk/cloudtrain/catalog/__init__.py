"""Instances, containers, prices and limits of AWS. In the data files, each value has a source and a date."""

from cloudtrain.catalog.images import (
    Image,
    find_image,
    image_regions,
    image_uri,
    images,
    newer_image,
)
from cloudtrain.catalog.instances import (
    Instance,
    find_instance,
    has_nvme,
    instance_names,
    s3_upload_bytes_per_second,
    suggest,
)
from cloudtrain.catalog.packages import (
    PackageList,
    first_wheel,
    image_packages,
    installed_with,
    is_known_package,
    known_package_of,
    normalized,
    packages_of,
)
from cloudtrain.catalog.prices import (
    Price,
    Prices,
    bundled_prices,
    hosting_key,
    merge_newest,
    read_prices,
)
from cloudtrain.catalog.source import Source

__all__ = [
    "Image",
    "Instance",
    "PackageList",
    "Price",
    "Prices",
    "Source",
    "bundled_prices",
    "find_image",
    "find_instance",
    "first_wheel",
    "has_nvme",
    "hosting_key",
    "image_packages",
    "image_regions",
    "image_uri",
    "images",
    "installed_with",
    "instance_names",
    "is_known_package",
    "known_package_of",
    "merge_newest",
    "newer_image",
    "normalized",
    "packages_of",
    "read_prices",
    "s3_upload_bytes_per_second",
    "suggest",
]
